"""Workloads of add_rms_norm: rows are tokens, width is the model's."""

from suites.pair_suite import PairSuite

WORKLOADS = [
    {"name": "smoke_fwd", "tier": "smoke", "dtype": "float32", "rows": 512, "width": 576, "direction": "forward"},
    {"name": "smoke_bwd", "tier": "smoke", "dtype": "float32", "rows": 512, "width": 576, "direction": "backward"},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float16", "rows": 37, "width": 1001, "direction": "forward"},
    {"name": "4k_fwd", "tier": "quick", "dtype": "bfloat16", "rows": 16384, "width": 4096, "direction": "forward"},
    {"name": "4k_bwd", "tier": "quick", "dtype": "bfloat16", "rows": 16384, "width": 4096, "direction": "backward"},
    {"name": "8k_fwd", "tier": "full", "dtype": "bfloat16", "rows": 16384, "width": 8192, "direction": "forward"},
    {"name": "8k_bwd", "tier": "full", "dtype": "bfloat16", "rows": 16384, "width": 8192, "direction": "backward"},
    {"name": "decode", "tier": "full", "dtype": "bfloat16", "rows": 32, "width": 4096, "direction": "forward"},
]


class AddRmsNorm(PairSuite):
    """asv's view of add_rms_norm."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
