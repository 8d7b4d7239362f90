"""Workloads of bias_gelu: the inner activations of a GPT-style MLP, in both forms."""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "dtype": "float32", "rows": 16, "inner": 1536, "form": "tanh"}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "rows": 16384, "inner": 16384}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "dtype": "float16", "rows": 37, "inner": 1001, "form": "erf", "direction": "both"},
    {**_LARGE, "name": "tanh_fwd", "tier": "quick", "form": "tanh", "direction": "forward"},
    {**_LARGE, "name": "tanh_bwd", "tier": "quick", "form": "tanh", "direction": "backward"},
    {**_LARGE, "name": "erf_fwd", "tier": "full", "form": "erf", "direction": "forward"},
    {**_LARGE, "name": "erf_bwd", "tier": "full", "form": "erf", "direction": "backward"},
    {**_LARGE, "name": "erf_f32_fwd", "tier": "full", "dtype": "float32", "form": "erf", "direction": "forward"},
]


class BiasGelu(PairSuite):
    """asv's view of bias_gelu."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
