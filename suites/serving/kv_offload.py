"""Workloads of kv_offload: more requests than the cache holds to their end, so that some are preempted."""

from suites.pair_suite import PairSuite
from suites.serving._shapes import AZURE, LARGE, REAL, TINY

WORKLOADS = [
    {**TINY, "name": "tiny", "tier": "smoke", "slots": 8, "cache_tokens": 256, "host_tokens": 1024},
    {**REAL, "name": "real", "tier": "quick", "slots": 16, "cache_tokens": 768, "host_tokens": 4096},
    {**LARGE, "name": "8b_bf16", "tier": "full", "cache_tokens": 24576, "host_tokens": 65536, "output_median": 512.0},
    {**AZURE, "name": "8b_azure", "tier": "full", "cache_tokens": 24576, "host_tokens": 65536},
]


class KvOffload(PairSuite):
    """asv's view of kv_offload."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
