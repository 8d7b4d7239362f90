"""Workloads of mixed_precision: layers of Llama-3.2-1B's shape, and of Llama-3-8B's, beside which AdamW is small."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 2, "width": 64, "ffn": 176, "heads": 4, "kv_heads": 2, "vocab": 257}
_1B = {"width": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocab": 32000}
_8B = {"width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", **_SMALL, "batch": 2, "seq": 64},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", **_SMALL}
    | {"width": 42, "ffn": 101, "heads": 3, "kv_heads": 1, "batch": 3, "seq": 37},
    {"name": "1b_4k", "tier": "quick", "dtype": "float32", **_1B, "layers": 4, "batch": 1, "seq": 4096},
    {"name": "1b_512", "tier": "full", "dtype": "float32", **_1B, "layers": 4, "batch": 1, "seq": 512},
    {"name": "8b_4k", "tier": "full", "dtype": "float32", **_8B, "layers": 4, "batch": 1, "seq": 4096},
]


class MixedPrecision(PairSuite):
    """asv's view of mixed_precision."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
