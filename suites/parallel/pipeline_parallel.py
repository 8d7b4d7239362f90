"""Workloads of pipeline_parallel: stages that cost about the same, few micro-batches for their bubble and many.

The head costs somewhat less than a layer, of which the last stage has one less than the others.
"""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 5, "width": 128, "ffn": 352, "heads": 4, "kv_heads": 4, "vocab": 1024}
_LARGE = {"layers": 15, "width": 2048, "ffn": 5632, "heads": 16, "kv_heads": 8, "vocab": 16384}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL}
    | {"batch": 8, "seq": 128, "micro_batches": 4, "chunks": 2},
    {"name": "few2", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 16, "seq": 2048, "micro_batches": 4, "chunks": 2},
    {"name": "many2", "tier": "quick", "dtype": "bfloat16", "ranks": 2, **_LARGE}
    | {"batch": 16, "seq": 2048, "micro_batches": 16, "chunks": 2},
    {"name": "few4", "tier": "full", "dtype": "bfloat16", "ranks": 4, **_LARGE}
    | {"batch": 16, "seq": 2048, "micro_batches": 4, "chunks": 2},
    {"name": "many4", "tier": "full", "dtype": "bfloat16", "ranks": 4, **_LARGE}
    | {"batch": 16, "seq": 2048, "micro_batches": 16, "chunks": 2},
    {"name": "few8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE, "layers": 31}
    | {"batch": 32, "seq": 1024, "micro_batches": 8, "chunks": 2},
    {"name": "many8", "tier": "full", "dtype": "bfloat16", "ranks": 8, **_LARGE, "layers": 31}
    | {"batch": 32, "seq": 1024, "micro_batches": 16, "chunks": 2},
]


class PipelineParallel(PairSuite):
    """asv's view of pipeline_parallel."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
