"""Workloads of tp_decode: four rows of 4096 in 16 bits make all-reduces of 32 KiB."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 2, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4, "vocab": 257}
_LARGE = {"layers": 32, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "batch": 4, "context": 64},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "batch": 3, "context": 31},
    {"name": "llama8b_32KiB", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 4}
    | {"context": 2048},
    {"name": "llama8b_8KiB", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 1, "context": 2048},
    {"name": "llama8b_256KiB", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 32}
    | {"context": 2048},
    {"name": "llama8b_32KiB_8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE, "batch": 4}
    | {"context": 2048},
]


class TpDecode(PairSuite):
    """asv's view of tp_decode."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
