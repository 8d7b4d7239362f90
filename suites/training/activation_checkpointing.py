"""Workloads of activation_checkpointing: layers of Llama-3.2-1B's and Llama-3-8B's shape over one long batch."""

from suites.pair_suite import PairSuite

_SMALL = {"layers": 4, "width": 64, "ffn": 176, "heads": 4, "kv_heads": 2, "vocab": 257}
_1B = {"width": 2048, "ffn": 8192, "heads": 32, "kv_heads": 8, "vocab": 32000, "chunk": 512}
_8B = {"width": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8, "vocab": 32000, "chunk": 512}

WORKLOADS = [
    {"name": "smoke", "tier": "smoke", "dtype": "float32", **_SMALL, "batch": 2, "seq": 128, "chunk": 64},
    {"name": "smoke_odd", "tier": "smoke", "dtype": "bfloat16", **_SMALL}
    | {"layers": 3, "width": 42, "ffn": 101, "heads": 3, "kv_heads": 1, "batch": 3, "seq": 37, "chunk": 50},
    {"name": "1b_4k", "tier": "quick", "dtype": "bfloat16", **_1B, "layers": 8, "batch": 1, "seq": 4096},
    {"name": "1b_16k", "tier": "full", "dtype": "bfloat16", **_1B, "layers": 8, "batch": 1, "seq": 16384},
    {"name": "8b_8k", "tier": "full", "dtype": "bfloat16", **_8B, "layers": 6, "batch": 1, "seq": 8192},
    {"name": "8b_2x8k", "tier": "full", "dtype": "bfloat16", **_8B, "layers": 6, "batch": 2, "seq": 8192},
]


class ActivationCheckpointing(PairSuite):
    """asv's view of activation_checkpointing."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
