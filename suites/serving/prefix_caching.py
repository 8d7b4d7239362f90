"""Workloads of prefix_caching: prompts that begin with one of a few system prompts, and a trace of conversations.

The system prompts end within a block, so that the rest of that block is computed for every request. Of the trace,
lengths are a sixteenth and the requests eight times as many as elsewhere: as many tokens, and more of them known.
"""

from suites.pair_suite import PairSuite
from suites.serving._shapes import LARGE, MOONCAKE, REAL, TINY

WORKLOADS = [
    {
        **TINY,
        "name": "tiny",
        "tier": "smoke",
        "requests": 16,
        "max_output": 16,
        "system_prompts": 2,
        "system_tokens": 200,
        "cache_tokens": 2048,
    },
    {
        **REAL,
        "name": "real",
        "tier": "quick",
        "requests": 16,
        "max_output": 32,
        "system_prompts": 2,
        "system_tokens": 200,
        "cache_tokens": 8192,
    },
    {**LARGE, "name": "8b_bf16", "tier": "full", "system_prompts": 8, "system_tokens": 1500},
    {
        **MOONCAKE,
        "name": "8b_mooncake",
        "tier": "full",
        "requests": 1024,
        "request_rate": 0.0,
        "time_scale": 0.05,
        "length_scale": 0.0625,
        "max_prompt": 2048,
    },
]


class PrefixCaching(PairSuite):
    """asv's view of prefix_caching."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
