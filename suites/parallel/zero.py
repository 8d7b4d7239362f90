"""Workloads of zero: models whose states outweigh their activations, and odd sizes that no number of ranks divides."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 4, "width": 128, "ffn": 352, "heads": 4, "kv_heads": 4, "vocab": 257, "tied": False}
_ODD = {"layers": 2, "width": 42, "ffn": 101, "heads": 3, "kv_heads": 1, "vocab": 127, "tied": True}
_LARGE = {"layers": 12, "width": 2048, "ffn": 5632, "heads": 16, "kv_heads": 8, "vocab": 32000, "tied": False}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL}
    | {"batch": 4, "seq": 16, "bucket_kib": 512},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", "ranks": 2, **_ODD}
    | {"batch": 5, "seq": 13, "bucket_kib": 64},
    {"name": "short", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 8, "seq": 512, "bucket_kib": 51200},
    {"name": "long", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 8, "seq": 4096, "bucket_kib": 51200},
    {"name": "tied", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE, "tied": True}
    | {"batch": 8, "seq": 512, "bucket_kib": 51200},
    {"name": "short8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE}
    | {"batch": 32, "seq": 512, "bucket_kib": 51200},
    {"name": "long8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE}
    | {"batch": 32, "seq": 4096, "bucket_kib": 51200},
]


class Zero(PairSuite):
    """asv's view of zero."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
