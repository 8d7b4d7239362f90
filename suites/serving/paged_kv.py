"""Workloads of paged_kv: a cache that holds few requests of the longest length and many of the usual one."""

from suites.pair_suite import PairSuite
from suites.serving._shapes import AZURE, LARGE, REAL, TINY

WORKLOADS = [
    {**TINY, "name": "tiny", "tier": "smoke", "slots": 8, "cache_tokens": 432},
    {**REAL, "name": "real", "tier": "quick", "slots": 16, "cache_tokens": 1600},
    {**LARGE, "name": "8b_bf16", "tier": "full", "slots": 128, "cache_tokens": 65536},
    {**AZURE, "name": "8b_azure", "tier": "full", "slots": 128, "cache_tokens": 65536},
]


class PagedKv(PairSuite):
    """asv's view of paged_kv."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
