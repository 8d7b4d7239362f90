"""Workloads of chunked_prefill: requests that come while others decode, some with long prompts."""

from suites.pair_suite import PairSuite
from suites.serving._shapes import AZURE, AZURE_SMALL, LARGE, MOONCAKE, REAL, TINY

WORKLOADS = [
    {**TINY, "name": "tiny", "tier": "smoke", "request_rate": 100.0, "step_tokens": 16, "sigma": 1.2},
    {**REAL, "name": "real", "tier": "quick", "request_rate": 2.0, "step_tokens": 32, "sigma": 1.2},
    {**AZURE_SMALL, "name": "real_azure", "tier": "quick", "step_tokens": 32},
    {**LARGE, "name": "8b_bf16", "tier": "full", "request_rate": 8.0, "step_tokens": 512, "sigma": 1.2},
    {**AZURE, "name": "8b_azure", "tier": "full", "step_tokens": 512},
    {**MOONCAKE, "name": "8b_mooncake", "tier": "full", "step_tokens": 512},
]


class ChunkedPrefill(PairSuite):
    """asv's view of chunked_prefill."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
