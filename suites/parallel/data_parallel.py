"""Workloads of data_parallel: short sequences leave little backward to hide communication in, long ones hide all."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 2, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4, "vocab": 257}
_LARGE = {"layers": 12, "width": 2048, "ffn": 5632, "heads": 16, "kv_heads": 8, "vocab": 32000}

WORKLOADS = [
    {"name": "smoke_short", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL}
    | {"batch": 4, "seq": 16, "micro_batches": 1, "bucket_kib": 256},
    {"name": "smoke_accumulated", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL}
    | {"batch": 7, "seq": 33, "micro_batches": 2, "bucket_kib": 256},
    {"name": "short", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 8, "seq": 512, "micro_batches": 1, "bucket_kib": 25600},
    {"name": "long", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 8, "seq": 4096, "micro_batches": 1, "bucket_kib": 25600},
    {"name": "accumulated", "tier": "full", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 16, "seq": 1024, "micro_batches": 4, "bucket_kib": 25600},
    {"name": "short8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE}
    | {"batch": 32, "seq": 512, "micro_batches": 1, "bucket_kib": 25600},
    {"name": "long8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE}
    | {"batch": 32, "seq": 4096, "micro_batches": 1, "bucket_kib": 25600},
]


class DataParallel(PairSuite):
    """asv's view of data_parallel."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
