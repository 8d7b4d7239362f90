"""What the fusion pairs share: element sizes, and sums over the directions that a workload measures."""

from __future__ import annotations

from harness.workload import Workload

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

#: Ceilings seen on an H200 (700 W): bytes a second of a large copy, dense bfloat16 products at a size of 8,192.
#: Used only where a prediction weighs bytes against products; a ratio of bytes alone needs no machine.
COPY = 4.28e12
PRODUCTS = 680e12


def over(workload: Workload, forward: float, backward: float) -> float:
    """The share of a count that the workload's direction takes."""
    return {"forward": forward, "backward": backward, "both": forward + backward}[workload.direction]
