"""Workloads of disaggregated_serving: those of chunked_prefill, at its rate a rank, on two ranks and on four.

``cache_tokens`` and ``slots`` are a rank's. Prompts get longer from the first to the last, so that one rank for prompts
and one for answers idle in turn; ``--set prefill_ranks`` and ``--ranks`` divide them otherwise.
"""

from suites.pair_suite import PairSuite
from suites.serving._shapes import AZURE, AZURE_SMALL, LARGE, MOONCAKE, REAL, TINY

_TWO = {"ranks": 2, "prefill_ranks": 1}
_FOUR = {"ranks": 4, "prefill_ranks": 2}

WORKLOADS = [
    {**TINY, **_TWO, "name": "tiny", "tier": "smoke"}
    | {"request_rate": 100.0, "step_tokens": 16, "prefill_step_tokens": 16, "sigma": 1.2},
    {**REAL, **_TWO, "name": "real", "tier": "quick"}
    | {"request_rate": 2.0, "step_tokens": 32, "prefill_step_tokens": 32, "sigma": 1.2},
    {**AZURE_SMALL, **_TWO, "name": "real_azure", "tier": "quick", "step_tokens": 32, "prefill_step_tokens": 32},
    {**LARGE, **_TWO, "name": "8b_bf16", "tier": "full"}
    | {"request_rate": 16.0, "step_tokens": 512, "prefill_step_tokens": 512, "sigma": 1.2},
    {**AZURE, **_TWO, "name": "8b_azure", "tier": "full"}
    | {"request_rate": 16.0, "step_tokens": 512, "prefill_step_tokens": 512},
    {**MOONCAKE, **_TWO, "name": "8b_mooncake", "tier": "full"}
    | {"request_rate": 2.0, "step_tokens": 512, "prefill_step_tokens": 512},
    {**MOONCAKE, **_FOUR, "name": "8b_mooncake4", "tier": "full"}
    | {"request_rate": 4.0, "requests": 256, "step_tokens": 512, "prefill_step_tokens": 512},
]


class DisaggregatedServing(PairSuite):
    """asv's view of disaggregated_serving."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
