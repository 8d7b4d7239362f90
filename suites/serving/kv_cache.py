"""Workloads of kv_cache: a batch of prompts, and how many tokens are decoded greedily after them."""

from suites.pair_suite import PairSuite

REAL = "smollm2-135m-instruct"

WORKLOADS = [
    {"name": "tiny", "tier": "smoke", "dtype": "float32", "model": "tiny", "batch": 2, "prompt": 32, "new": 16},
    {
        "name": "real",
        "tier": "quick",
        "dtype": "float32",
        "model": REAL,
        "text": "pydoc",
        "batch": 1,
        "prompt": 48,
        "new": 12,
    },
    {
        "name": "real_bf16",
        "tier": "full",
        "dtype": "bfloat16",
        "model": REAL,
        "text": "pydoc",
        "batch": 4,
        "prompt": 256,
        "new": 64,
    },
    {
        "name": "8b_bf16",
        "tier": "full",
        "dtype": "bfloat16",
        "model": "llama-3-8b",
        "batch": 1,
        "prompt": 512,
        "new": 64,
    },
]


class KvCache(PairSuite):
    """asv's view of kv_cache."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
