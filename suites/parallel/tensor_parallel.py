"""Workloads of tensor_parallel: 8 heads and 4 key-value heads at least, so that they divide over 2 and 4 ranks."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 2, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4}
_LARGE = {"layers": 8, "width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 128256}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "vocab": 256, "batch": 2, "seq": 32},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "ffn": 171, "vocab": 257}
    | {"batch": 3, "seq": 31},
    {"name": "llama8b_layers", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 1, "seq": 4096},
    {"name": "llama8b_layers_short", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE, "batch": 1, "seq": 512},
    {"name": "llama8b_layers8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE, "batch": 1, "seq": 4096},
]


class TensorParallel(PairSuite):
    """asv's view of tensor_parallel."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
