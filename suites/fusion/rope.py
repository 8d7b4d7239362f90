"""Workloads of rope: grouped-query heads of Llama-3-8B over whole sequences, and a decode step."""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "batch": 2, "seq": 12, "heads": 9, "kv_heads": 3, "head_dim": 64}
_LARGE: dict[str, Any] = {"dtype": "bfloat16", "batch": 8, "seq": 8192, "heads": 32, "kv_heads": 8, "head_dim": 128}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "dtype": "float32", "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "dtype": "float32", "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "dtype": "float16", "batch": 1, "seq": 13, "head_dim": 80, "direction": "both"},
    {**_LARGE, "name": "8k_fwd", "tier": "quick", "direction": "forward"},
    {**_LARGE, "name": "8k_bwd", "tier": "quick", "direction": "backward"},
    {**_LARGE, "name": "mha_d64_fwd", "tier": "full", "kv_heads": 32, "head_dim": 64, "direction": "forward"},
    {**_LARGE, "name": "mha_d64_bwd", "tier": "full", "kv_heads": 32, "head_dim": 64, "direction": "backward"},
    {**_LARGE, "name": "decode", "tier": "full", "batch": 128, "seq": 1, "direction": "forward"},
]


class Rope(PairSuite):
    """asv's view of rope."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
