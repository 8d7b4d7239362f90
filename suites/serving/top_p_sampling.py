"""Workloads of top_p_sampling: the last operation of a decode step, at a small and a large vocabulary."""

from suites.pair_suite import PairSuite

SHAPE = {"dtype": "bfloat16", "spread": 3.0, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "direction": "forward"}

WORKLOADS = [
    {**SHAPE, "name": "tiny", "tier": "smoke", "dtype": "float32", "rows": 3, "vocab": 1000, "top_k": 50},
    {**SHAPE, "name": "b64_128k", "tier": "quick", "rows": 64, "vocab": 128256},
    {**SHAPE, "name": "b1_128k", "tier": "full", "rows": 1, "vocab": 128256},
    {**SHAPE, "name": "b256_49k", "tier": "full", "rows": 256, "vocab": 49152, "top_k": 50},
]


class TopPSampling(PairSuite):
    """asv's view of top_p_sampling."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
