"""A serving workload replayed against a server of somebody else: the same trace, the same figures.

    result = measure_peer(Endpoint("http://localhost:8000"), workload, trace_path)
    print(result.summary.metrics["ttft_p99"])

The server's model and tokenizer are its own: prompts are token ids of the workload's lengths, drawn below ``vocab``,
and the answer's length is asked for exactly. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from harness.serving.endpoint import Endpoint, Outgoing, replay
from harness.serving.metrics import Slo, Summary, summarize
from harness.serving.synthetic import prompt_ids
from harness.serving.trace import Trace
from harness.serving.workload_trace import trace_for
from harness.workload import Workload

#: Ids from here on are words in the vocabularies in use; lower ones are bytes and control tokens.
FIRST_WORD: Final = 1000
#: Every vocabulary of a current model is larger.
SMALLEST_VOCAB: Final = 32_000


@dataclass(frozen=True)
class PeerResult:
    """``seconds`` is the span of the replay, ``timeline`` and ``summary`` are those of a serve run."""

    seconds: float
    timeline: dict[str, Any]
    summary: Summary
    trace: Trace


def outgoing(trace: Trace, seed: int = 0, vocab: int = SMALLEST_VOCAB) -> list[Outgoing]:
    """The requests of a trace with prompts of token ids, equal where the trace says that prefixes are.

    Another seed gives other words, so that a server's prefix cache does not answer the second run from the first.
    """
    made = []
    for index, request in enumerate(trace.requests):
        if request.text is not None:
            prompt: list[int] | str = request.text
        else:
            words = prompt_ids(request, index, vocab - FIRST_WORD, seed, trace.prefix_block_tokens)
            prompt = [FIRST_WORD + word for word in words]
        made.append(Outgoing(f"r{index:05d}", prompt, request.output_tokens, request.arrival))
    return made


def measure_peer(
    endpoint: Endpoint,
    workload: Workload,
    trace_path: str | None = None,
    *,
    max_concurrency: int = 0,
    seed: int = 0,
    vocab: int = SMALLEST_VOCAB,
    slo: Slo | None = None,
    gpu_hour_price: float | None = None,
    gpus: int = 1,
    replayer: Callable[..., dict[str, Any]] = replay,
) -> PeerResult:
    """Replays a workload's trace once, open loop, and reads its figures.

    Raises:
        UsageError: no such server, no such trace, or a limit that makes no sense.
    """
    trace = trace_for(workload, trace_path)
    timeline = replayer(endpoint, outgoing(trace, seed, vocab), max_concurrency)
    summary = summarize(timeline, slo, gpu_hour_price, gpus)
    return PeerResult(summary.serve["span"], timeline, summary, trace)
