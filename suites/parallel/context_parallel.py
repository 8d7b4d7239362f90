"""Workloads of context_parallel: sequences from where the link is exposed to where attention hides it."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 2, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4, "vocab": 257}
_LARGE = {"layers": 4, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "batch": 1, "seq": 128},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "batch": 3, "seq": 36},
    {"name": "seq8k", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 1, "seq": 8192},
    {"name": "seq32k", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 1, "seq": 32768},
    {"name": "seq64k_8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE, "batch": 1, "seq": 65536},
]


class ContextParallel(PairSuite):
    """asv's view of context_parallel."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
