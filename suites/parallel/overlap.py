"""Workloads of overlap: the last product of a feed-forward, from few tokens (the link's latency) to many."""

from suites.pair_suite import PairSuite

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, "tokens": 256, "inner": 1024, "width": 256}
    | {"chunks": 4},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", "ranks": 2, "tokens": 101, "inner": 333, "width": 97}
    | {"chunks": 3},
    *(
        {"name": f"tokens{tokens}", "tier": tier, "dtype": "bfloat16", "ranks": 2, "tokens": tokens, "inner": 14336}
        | {"width": 4096, "chunks": 4}
        for tokens, tier in ((2048, "full"), (8192, "quick"), (32768, "full"))
    ),
    {"name": "tokens8192_8", "tier": "full", "dtype": "bfloat16", "ranks": 8, "tokens": 8192, "inner": 14336}
    | {"width": 4096, "chunks": 4},
]


class Overlap(PairSuite):
    """asv's view of overlap."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
