"""Why a serving workload cannot run here."""

from __future__ import annotations

from harness.serving.workload_trace import needs_trace
from harness.workload import Workload
from impls.model.resolve import not_here


def cannot(workload: Workload) -> str | None:
    """For ``Variant(supports=...)``: weights or a trace file that are not at hand."""
    return not_here(workload) or needs_trace(workload)
