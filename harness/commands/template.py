"""What ``pairbench new`` writes: a small pair that runs as it is, with a note at each place to change."""

PAIR_TEMPLATE = '''"""NAME: two passes over the activations against one (`pairbench list` shows this line: change it).

    out = (x * scale).relu()

Bytes per element of e bytes: plain, two passes that each read and write, 4e; fast, in place after the first, 3e.
"""

# Shapes: R rows, W width.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.pair import Claim, Context, Pair, Variant, Work
from harness.workload import Workload

ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """x (R, W), drawn from the context's seed: everything that varies is made here."""
    return {"x": ctx.randn(workload.rows, workload.width), "scale": 1.7}


def plain(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The plain way: what a reader would write first."""
    return (x * scale).relu()


def fast(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The fast way: the same, touching memory less."""
    return (x * scale).relu_()


def oracle(x: torch.Tensor, scale: float) -> torch.Tensor:
    """The definition; it is given float64."""
    return torch.clamp(x * scale, min=0)


def work(workload: Workload) -> Work:
    """What the mathematics needs, whoever computes it."""
    elements = workload.rows * workload.width
    return Work(
        flops=2 * elements,
        bytes=2 * elements * ITEMSIZE[workload.dtype],
        items=workload.rows,
        unit="rows",
        reasons={"bytes": "x read once, the result written once", "flops": "a product and a comparison"},
    )


def predict(workload: Workload) -> float:
    """Ratio of the bytes counted above."""
    return 4 / 3


PAIR = Pair(
    name="NAME",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower", throughput="higher"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": plain,
        "optimized": fast,
        "torch_compile": Variant(plain, peer="torch", requires=("compiler",), compiled=True),
    },
    work=work,
    predict=predict,
)
'''

SUITE_TEMPLATE = '''"""Workloads of NAME."""

from suites.pair_suite import PairSuite

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "rows": 1024, "width": 1024, "direction": "forward"},
    {"name": "large", "tier": "quick", "dtype": "bfloat16", "rows": 16384, "width": 8192, "direction": "forward"},
]


class CLASS(PairSuite):
    """asv's view of NAME."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
'''
