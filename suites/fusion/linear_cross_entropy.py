"""Workloads of linear_cross_entropy: the head of Llama-3-8B over a batch of tokens."""

from typing import Any

from suites.pair_suite import PairSuite

# In float16 even where it is small: a float32 loss is one number, whose last bit decides between right and wrong.
_SMOKE: dict[str, Any] = {"tier": "smoke", "dtype": "float16", "tokens": 16, "width": 64, "vocabulary": 4096}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "tokens": 8192, "width": 4096, "vocabulary": 128256}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "direction": "forward"},
    {**_SMOKE, "name": "smoke_both", "direction": "both"},
    {**_SMOKE, "name": "smoke_odd", "tokens": 7, "width": 33, "vocabulary": 1001} | {"direction": "both"},
    {**_LARGE, "name": "8k_both", "tier": "quick", "direction": "both"},
    {**_LARGE, "name": "8k_fwd", "tier": "full", "direction": "forward"},
    {**_LARGE, "name": "32k_both", "tier": "full", "tokens": 32768, "vocabulary": 32000, "direction": "both"},
]


class LinearCrossEntropy(PairSuite):
    """asv's view of linear_cross_entropy."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
