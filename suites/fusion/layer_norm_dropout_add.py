"""Workloads of layer_norm_dropout_add: rows are tokens, width is the model's, p the rate of dropping."""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "dtype": "float32", "rows": 24, "width": 576, "p": 0.1}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "rows": 32768, "width": 4096, "p": 0.1}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "dtype": "float16", "rows": 37, "width": 1001, "p": 0.5, "direction": "both"},
    {**_LARGE, "name": "4k_fwd", "tier": "quick", "direction": "forward"},
    {**_LARGE, "name": "4k_bwd", "tier": "quick", "direction": "backward"},
    {**_LARGE, "name": "8k_fwd", "tier": "full", "width": 8192, "direction": "forward"},
    {**_LARGE, "name": "8k_bwd", "tier": "full", "width": 8192, "direction": "backward"},
    {**_LARGE, "name": "1k_fwd", "tier": "full", "rows": 131072, "width": 1024, "direction": "forward"},
    {**_LARGE, "name": "1k_bwd", "tier": "full", "rows": 131072, "width": 1024, "direction": "backward"},
]


class LayerNormDropoutAdd(PairSuite):
    """asv's view of layer_norm_dropout_add."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
