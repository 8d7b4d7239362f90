"""Every metric that a record may carry: its unit, which way is better, and what it means.

Direction belongs to the metric, never to the tool that shows it. Adding a metric is adding a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher"]


@dataclass(frozen=True)
class Metric:
    """A measured quantity. ``judged`` metrics are watched for regressions; the others explain."""

    unit: str
    better: Better
    title: str
    means: str
    judged: bool = False


METRICS: dict[str, Metric] = {
    "latency": Metric("s", "lower", "Latency", "Median time of one run() of the case.", judged=True),
    "throughput": Metric(
        "items/s", "higher", "Throughput", "Items of the workload over the median latency.", judged=True
    ),
    "peak_memory": Metric(
        "B",
        "lower",
        "Peak memory",
        "Peak allocated above what was allocated before the call, in a pass of its own.",
        judged=True,
    ),
    "absolute_memory": Metric("B", "lower", "Absolute peak memory", "Peak allocated, inputs and weights included."),
    "reserved_memory": Metric("B", "lower", "Reserved memory", "What the allocator held at the peak."),
    "device_memory": Metric("B", "lower", "Device memory", "What NVML says the process held."),
    "mfu": Metric("1", "higher", "MFU", "Model FLOPs over the dense peak of the dtype really used."),
    "mbu": Metric("1", "higher", "MBU", "Least bytes over the datasheet's memory bandwidth."),
    "flops_rate": Metric("FLOP/s", "higher", "FLOP rate", "Model FLOPs over the median latency."),
    "bandwidth": Metric("B/s", "higher", "Bandwidth", "Least bytes over the median latency."),
    "floor_share": Metric("1", "higher", "Share of the floor", "The floor of the workload over the median latency."),
    "speedup": Metric("1", "higher", "Speedup over baseline", "Ratio of medians, from paired rounds.", judged=True),
    "speedup_peer": Metric(
        "1",
        "higher",
        "Speedup over the best one-line peer",
        "Ratio of medians to the fastest one-line torch peer.",
        judged=True,
    ),
    "energy": Metric("J", "lower", "Energy", "Energy of one run by NVML's counter."),
    "compile_s": Metric(
        "s", "lower", "First-run cost", "Building the case and its first call: compilation, capture, tuning."
    ),
    "algbw": Metric("B/s", "higher", "Algorithm bandwidth", "Payload bytes over time (nccl-tests)."),
    "busbw": Metric("B/s", "higher", "Bus bandwidth", "algbw times the collective's factor (nccl-tests)."),
    "skew": Metric("s", "lower", "Skew", "Slowest rank minus fastest rank, median over samples."),
    "exposed_comm": Metric(
        "s", "lower", "Exposed communication", "Step time minus the same step without communication."
    ),
    "hidden_share": Metric(
        "1", "higher", "Communication hidden", "Share of the communication's own time that a step does not wait for."
    ),
    "ttft_p50": Metric("s", "lower", "TTFT, median", "Arrival of a request to its first token.", judged=True),
    "ttft_p90": Metric("s", "lower", "TTFT, p90", "Arrival of a request to its first token."),
    "ttft_p99": Metric("s", "lower", "TTFT, p99", "Arrival of a request to its first token.", judged=True),
    "itl_p50": Metric(
        "s",
        "lower",
        "ITL, median",
        "Time between consecutive tokens of a request, the first excluded.",
        judged=True,
    ),
    "itl_p90": Metric("s", "lower", "ITL, p90", "Time between consecutive tokens of a request, the first excluded."),
    "itl_p99": Metric(
        "s",
        "lower",
        "ITL, p99",
        "Time between consecutive tokens of a request, the first excluded.",
        judged=True,
    ),
    "tpot_p50": Metric("s", "lower", "TPOT, median", "(End-to-end minus TTFT) over (tokens minus one), per request."),
    "tpot_p90": Metric("s", "lower", "TPOT, p90", "(End-to-end minus TTFT) over (tokens minus one), per request."),
    "tpot_p99": Metric("s", "lower", "TPOT, p99", "(End-to-end minus TTFT) over (tokens minus one), per request."),
    "e2e_p50": Metric("s", "lower", "End to end, median", "Arrival of a request to its last token."),
    "e2e_p90": Metric("s", "lower", "End to end, p90", "Arrival of a request to its last token."),
    "e2e_p99": Metric("s", "lower", "End to end, p99", "Arrival of a request to its last token."),
    "output_rate": Metric(
        "tokens/s", "higher", "Output tokens/s", "Tokens emitted over the span of the run.", judged=True
    ),
    "goodput": Metric("requests/s", "higher", "Goodput", "Requests that met the stated SLO over the span of the run."),
    "failed_requests": Metric("1", "lower", "Failed requests", "Share of requests that failed or were refused."),
    "cache_hit_rate": Metric("1", "higher", "Cache hit rate", "Prompt tokens found in the cache over prompt tokens."),
    "acceptance_length": Metric("tokens", "higher", "Acceptance length", "Tokens emitted per verification step."),
    "cost_per_mtok": Metric("1/Mtok", "lower", "Cost per million tokens", "Price of the GPU hours over output tokens."),
    "preemptions": Metric("1", "lower", "Preemptions", "Times that a request gave its blocks up, over requests."),
    "cache_waste": Metric("1", "lower", "Cache wasted", "Reserved cache slots that never held a token, over reserved."),
    "running_requests": Metric("requests", "higher", "Requests running", "Mean number of requests running at once."),
}
