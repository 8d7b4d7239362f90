"""Workloads of softmax: rows that fit the registers, the longest that do, and a vocabulary's."""

from typing import Any

from suites.pair_suite import PairSuite

# In float16 even where it is small: in float32 torch's own kernel on a CPU is less exact than the plain passes.
_SMOKE: dict[str, Any] = {"tier": "smoke", "dtype": "float16", "rows": 24, "columns": 1024}
_LARGE: dict[str, Any] = {"dtype": "bfloat16"}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "rows": 37, "columns": 1001, "direction": "both"},
    {**_SMOKE, "name": "smoke_long", "rows": 3, "columns": 33000, "direction": "both"},
    {**_LARGE, "name": "4k_fwd", "tier": "quick", "rows": 65536, "columns": 4096, "direction": "forward"},
    {**_LARGE, "name": "4k_bwd", "tier": "quick", "rows": 65536, "columns": 4096, "direction": "backward"},
    {**_LARGE, "name": "32k_fwd", "tier": "full", "rows": 16384, "columns": 32768, "direction": "forward"},
    {**_LARGE, "name": "32k_bwd", "tier": "full", "rows": 16384, "columns": 32768, "direction": "backward"},
    {**_LARGE, "name": "128k_fwd", "tier": "full", "rows": 4096, "columns": 131072, "direction": "forward"},
    {**_LARGE, "name": "128k_bwd", "tier": "full", "rows": 4096, "columns": 131072, "direction": "backward"},
    {**_LARGE, "name": "1k_fwd", "tier": "full", "rows": 262144, "columns": 1024, "direction": "forward"},
]


class Softmax(PairSuite):
    """asv's view of softmax."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
