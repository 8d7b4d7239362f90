"""Workloads of mla_decode: the latent widths of DeepSeek-V2 (512 + 64), with the heads of its lite and full models."""

from suites.pair_suite import PairSuite

SHAPE = {"dtype": "bfloat16", "latent": 512, "rope": 64, "head_dim": 128, "direction": "forward"}

WORKLOADS = [
    {
        **SHAPE,
        "name": "tiny",
        "tier": "smoke",
        "dtype": "float32",
        "latent": 48,
        "rope": 16,
        "head_dim": 32,
        "batch": 2,
        "heads": 5,
        "context": 100,
    },
    {**SHAPE, "name": "h16_b32_4k", "tier": "quick", "batch": 32, "heads": 16, "context": 4096},
    {**SHAPE, "name": "h128_b32_4k", "tier": "full", "batch": 32, "heads": 128, "context": 4096},
    {**SHAPE, "name": "h16_b1_32k", "tier": "full", "batch": 1, "heads": 16, "context": 32768},
]


class MlaDecode(PairSuite):
    """asv's view of mla_decode."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
