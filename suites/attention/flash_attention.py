"""Workloads of flash_attention: `tokens` a batch split into sequences of `seq`, heads · head_dim wide.

The grid of the published comparisons (16,384 tokens, 2048 wide, bfloat16): S of 2k to 16k, head dimensions 64 and 128,
full and causal, forward and backward. `window` 0 is none.
"""

from suites.pair_suite import PairSuite


def _grid(tier: str, seqs: tuple[int, ...], dims: tuple[int, ...]) -> list[dict[str, object]]:
    return [
        {
            "name": f"d{dim}_{seq // 1024}k_{'causal' if causal else 'full'}_{direction[:3]}",
            "tier": tier,
            "dtype": "bfloat16",
            "tokens": 16384,
            "seq": seq,
            "heads": 2048 // dim,
            "kv_heads": 2048 // dim,
            "head_dim": dim,
            "causal": causal,
            "window": 0,
            "direction": direction,
        }
        for dim in dims
        for seq in seqs
        for causal in (False, True)
        for direction in ("forward", "backward")
    ]


_SMOKE = {"tier": "smoke", "dtype": "float16", "tokens": 128, "seq": 64, "heads": 2, "head_dim": 64}
_GROUPED = {"dtype": "bfloat16", "tokens": 16384, "heads": 32, "kv_heads": 8, "head_dim": 128, "causal": True}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "kv_heads": 2, "causal": True, "window": 0, "direction": "forward"},
    {**_SMOKE, "name": "smoke_bwd", "kv_heads": 1, "causal": True, "window": 0, "direction": "backward"},
    {**_SMOKE, "name": "smoke_odd", "tokens": 74, "seq": 37, "kv_heads": 1, "causal": True, "window": 9}
    | {"direction": "both"},
    *_grid("quick", (4096,), (128, 64)),
    *_grid("full", (2048, 8192, 16384), (128, 64)),
    {**_GROUPED, "name": "gqa_8k_fwd", "tier": "full", "seq": 8192, "window": 0, "direction": "forward"},
    {**_GROUPED, "name": "gqa_8k_bwd", "tier": "full", "seq": 8192, "window": 0, "direction": "backward"},
    {**_GROUPED, "name": "window_16k_fwd", "tier": "full", "seq": 16384, "window": 1024, "direction": "forward"},
    {**_GROUPED, "name": "window_16k_bwd", "tier": "full", "seq": 16384, "window": 1024, "direction": "backward"},
]


class FlashAttention(PairSuite):
    """asv's view of flash_attention."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
