"""Workloads of collectives: the payload from 1 KiB to 1 GiB, in 16 pieces; a piece is what a small tensor would be."""

from suites.pair_suite import PairSuite

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SIZES = {"1KiB": 1 << 10, "32KiB": 1 << 15, "1MiB": 1 << 20, "32MiB": 1 << 25, "1GiB": 1 << 30}
#: Sizes between, which show where a backend changes its protocol; for the curve of this machine's link.
FINE = {"4KiB": 1 << 12, "128KiB": 1 << 17, "512KiB": 1 << 19, "4MiB": 1 << 22, "16MiB": 1 << 24, "128MiB": 1 << 27}
#: On CPU ranks the middle one of three sizes is measured for all; three are a curve of the sum that the others need.
SMALL = {"4KiB": 1 << 12, "4MiB": 1 << 22}

WORKLOADS = [
    *(
        {"name": f"smoke_{op}", "tier": "smoke", "dtype": "float32", "ranks": 2, "op": op, "payload": 1 << 18}
        | {"pieces": 16}
        for op in OPS
    ),
    *(
        {"name": f"smoke_all_reduce_{size}", "tier": "smoke", "dtype": "float32", "ranks": 2, "op": "all_reduce"}
        | {"payload": payload, "pieces": 16}
        for size, payload in SMALL.items()
    ),
    *(
        {"name": f"{op}_{size}", "tier": "quick", "dtype": "bfloat16", "ranks": 2, "op": op, "payload": payload}
        | {"pieces": 16}
        for op in OPS
        for size, payload in SIZES.items()
    ),
    *(
        {"name": f"{op}_{size}", "tier": "full", "dtype": "bfloat16", "ranks": 2, "op": op, "payload": payload}
        | {"pieces": 16}
        for op in OPS
        for size, payload in FINE.items()
    ),
    *(
        {"name": f"{op}_{size}_8", "tier": "full", "dtype": "bfloat16", "ranks": 8, "op": op, "payload": payload}
        | {"pieces": 16}
        for op in OPS
        for size, payload in (SIZES | FINE).items()
    ),
]


class Collectives(PairSuite):
    """asv's view of collectives."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
