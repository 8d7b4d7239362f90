"""The trace that a serving workload names: its dimensions, and what they mean. Imports no torch.

Dimensions of a serving workload:

============== =======================================================================================================
trace          ``synthetic`` (log-normal lengths), or a file that ``--trace`` gives
requests       how many; of a file the first so many
request_rate   mean arrivals a second; 0 sends all at time 0 (synthetic) or keeps the trace's own times
burstiness     coefficient of variation of synthetic gaps: 1 is Poisson, above it requests come in bursts
prompt_median, output_median, sigma    of the synthetic lengths
length_scale, time_scale               lengths and times of a file are multiplied by them
max_prompt, max_output                 longer ones are cut
============== =======================================================================================================
"""

from __future__ import annotations

import math
from typing import Final

from harness.errors import UsageError
from harness.serving.synthetic import synthetic_trace
from harness.serving.trace import Shape, Trace
from harness.serving.traces import load_trace
from harness.workload import Workload

SYNTHETIC: Final = "synthetic"
#: Lengths and arrivals belong to the workload, so every seed sends the same load; only the words differ.
LENGTHS_SEED: Final = 0


def trace_for(workload: Workload, trace_path: str | None = None) -> Trace:
    """The trace that a workload names, fitted to its limits.

    Raises:
        UsageError: the file is missing or has no usable row, the workload names a trace file and none was given, or
            it asks for no request.
    """
    rate = float(workload.request_rate)
    if trace_path is not None:
        shape = Shape(
            time_scale=float(workload.dims.get("time_scale", 1.0)),
            length_scale=float(workload.dims.get("length_scale", 1.0)),
            limit=int(workload.requests),
            max_prompt=int(workload.max_prompt),
            max_output=int(workload.max_output),
            request_rate=rate,
        )
        return load_trace(trace_path, shape)
    if workload.trace != SYNTHETIC:
        raise UsageError(f"workload {workload.name!r} replays {workload.trace}: give the file with --trace PATH")
    if int(workload.requests) < 1:
        raise UsageError(f"workload {workload.name!r}: requests must be at least 1, got {workload.requests}")
    return synthetic_trace(
        int(workload.requests),
        rate or math.inf,
        LENGTHS_SEED,
        cv=float(workload.dims.get("burstiness", 1.0)),
        prompt_median=float(workload.prompt_median),
        output_median=float(workload.output_median),
        sigma=float(workload.sigma),
        max_prompt=int(workload.max_prompt),
        max_output=int(workload.max_output),
    )


def needs_trace(workload: Workload) -> str | None:
    """Why a workload that names a trace file cannot run without it, for ``Variant(supports=...)``."""
    if workload.trace != SYNTHETIC and "trace" not in workload.digests:
        return f"replays {workload.trace}: give the file with --trace PATH"
    return None
