"""Workloads of expert_parallel: one mixture-of-experts layer of Mixtral 8×7B and of Qwen3-30B-A3B, even and skewed."""

from suites.pair_suite import PairSuite

_SMALL = {"tokens": 64, "width": 32, "inner": 48, "experts": 8, "choices": 2}
_MIXTRAL = {"dtype": "bfloat16", "width": 4096, "inner": 14336, "experts": 8, "choices": 2}
_QWEN3 = {"dtype": "bfloat16", "width": 2048, "inner": 768, "experts": 128, "choices": 8}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "skew": 0.0},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "float32", "ranks": 2, **_SMALL, "tokens": 37, "experts": 5}
    | {"skew": 2.0},
    {"name": "mixtral_8k", "tier": "quick", "ranks": 2, **_MIXTRAL, "tokens": 8192, "skew": 0.0},
    {"name": "qwen3_16k", "tier": "quick", "ranks": 2, **_QWEN3, "tokens": 16384, "skew": 0.0},
    {"name": "mixtral_1k", "tier": "full", "ranks": 2, **_MIXTRAL, "tokens": 1024, "skew": 0.0},
    {"name": "qwen3_16k_skewed", "tier": "full", "ranks": 2, **_QWEN3, "tokens": 16384, "skew": 1.0},
    {"name": "mixtral_32k_8", "tier": "full", "ranks": 8, **_MIXTRAL, "tokens": 32768, "skew": 0.0},
    {"name": "qwen3_64k_8", "tier": "full", "ranks": 8, **_QWEN3, "tokens": 65536, "skew": 0.0},
]


class ExpertParallel(PairSuite):
    """asv's view of expert_parallel."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
