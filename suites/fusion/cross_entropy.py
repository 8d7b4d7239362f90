"""Workloads of cross_entropy: Llama-3's vocabulary over a batch of tokens, with and without label smoothing."""

from typing import Any

from suites.pair_suite import PairSuite

# In float16 even where it is small: a float32 loss is one number, whose last bit decides between right and wrong.
_SMOKE: dict[str, Any] = {"tier": "smoke", "dtype": "float16", "tokens": 8, "vocabulary": 4096, "smoothing": 0.0}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "tokens": 8192, "vocabulary": 128256, "smoothing": 0.0}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "tokens": 7, "vocabulary": 1001, "smoothing": 0.1} | {"direction": "both"},
    {**_LARGE, "name": "128k_fwd", "tier": "quick", "direction": "forward"},
    {**_LARGE, "name": "128k_bwd", "tier": "quick", "direction": "backward"},
    {**_LARGE, "name": "128k_both", "tier": "full", "direction": "both"},
    {**_LARGE, "name": "smoothed_both", "tier": "full", "smoothing": 0.1, "direction": "both"},
    {**_LARGE, "name": "32k_both", "tier": "full", "tokens": 32768, "vocabulary": 32000, "direction": "both"},
]


class CrossEntropy(PairSuite):
    """asv's view of cross_entropy."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
