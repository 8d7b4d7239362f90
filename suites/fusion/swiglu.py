"""Workloads of swiglu: the gate alone, and the gate inside the whole MLP (Llama-3-8B's 4096 to 14336)."""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "scope": "gate", "rows": 16, "inner": 1536, "width": 576}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "rows": 16384, "inner": 14336, "width": 4096}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "dtype": "float32", "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "dtype": "float32", "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "dtype": "float16", "rows": 37, "inner": 1001, "direction": "both"},
    {**_SMOKE, "name": "smoke_mlp", "dtype": "float32", "scope": "mlp", "rows": 33, "inner": 96, "width": 64}
    | {"direction": "both"},
    {**_LARGE, "name": "gate_fwd", "tier": "quick", "scope": "gate", "direction": "forward"},
    {**_LARGE, "name": "gate_bwd", "tier": "quick", "scope": "gate", "direction": "backward"},
    {**_LARGE, "name": "mlp_fwd", "tier": "quick", "scope": "mlp", "direction": "forward"},
    {**_LARGE, "name": "mlp_bwd", "tier": "full", "scope": "mlp", "direction": "backward"},
    {**_LARGE, "name": "gate_f32_fwd", "tier": "full", "scope": "gate", "dtype": "float32", "direction": "forward"},
    {**_LARGE, "name": "gate_f32_bwd", "tier": "full", "scope": "gate", "dtype": "float32", "direction": "backward"},
    {**_LARGE, "name": "decode", "tier": "full", "scope": "gate", "rows": 32, "direction": "forward"},
]


class Swiglu(PairSuite):
    """asv's view of swiglu."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
