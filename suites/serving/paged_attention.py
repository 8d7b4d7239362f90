"""Workloads of paged_attention: the decode step of a model with 32 query and 8 KV heads, at full and small batches."""

from suites.pair_suite import PairSuite

SHAPE = {
    "dtype": "bfloat16",
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "block_size": 16,
    "cache": "same",
    "ragged": False,
    "direction": "forward",
}

WORKLOADS = [
    {
        **SHAPE,
        "name": "tiny",
        "tier": "smoke",
        "dtype": "float32",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 32,
        "batch": 3,
        "context": 70,
        "ragged": True,
    },
    {**SHAPE, "name": "b32_4k", "tier": "quick", "batch": 32, "context": 4096},
    {**SHAPE, "name": "b128_4k", "tier": "full", "batch": 128, "context": 4096},
    {**SHAPE, "name": "b64_16k", "tier": "full", "batch": 64, "context": 16384},
    {**SHAPE, "name": "b1_32k", "tier": "full", "batch": 1, "context": 32768},
    {**SHAPE, "name": "b64_ragged", "tier": "full", "batch": 64, "context": 8192, "ragged": True},
    {**SHAPE, "name": "b64_16k_fp8", "tier": "full", "batch": 64, "context": 16384, "cache": "float8_e4m3fn"},
    {**SHAPE, "name": "b64_16k_int8", "tier": "full", "batch": 64, "context": 16384, "cache": "int8"},
    {**SHAPE, "name": "b32_4k_page128", "tier": "full", "batch": 32, "context": 4096, "block_size": 128},
]


class PagedAttention(PairSuite):
    """asv's view of paged_attention."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
