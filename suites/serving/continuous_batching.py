"""Workloads of continuous_batching: all requests queued at time 0, answers of very different lengths."""

from suites.pair_suite import PairSuite
from suites.serving._shapes import AZURE, AZURE_SMALL, LARGE, REAL, TINY

WORKLOADS = [
    {**TINY, "name": "tiny", "tier": "smoke"},
    {**REAL, "name": "real", "tier": "quick"},
    {**AZURE_SMALL, "name": "real_azure", "tier": "quick", "time_scale": 1e-9},
    {**LARGE, "name": "8b_bf16", "tier": "full"},
    {**AZURE, "name": "8b_azure", "tier": "full", "request_rate": 1000000.0},
]


class ContinuousBatching(PairSuite):
    """asv's view of continuous_batching."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
