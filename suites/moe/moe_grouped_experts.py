"""Workloads of moe_grouped_experts: one layer of a model of few large experts and of one of many small ones.

Mixtral 8×7B has 8 experts of 4096 × 14336, two a token; Qwen3-30B-A3B 128 of 2048 × 768, eight a token. 64 tokens are a
decode step, 4,096 and 16,384 a prefill or a training step. ``skew`` is the exponent of Zipf's law: 0 is even.
"""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "tokens": 48, "width": 64, "inner": 48, "experts": 4, "choices": 2}
_MIXTRAL: dict[str, Any] = {"dtype": "bfloat16", "width": 4096, "inner": 14336, "experts": 8, "choices": 2}
_QWEN3: dict[str, Any] = {"dtype": "bfloat16", "width": 2048, "inner": 768, "experts": 128, "choices": 8}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_fwd", "dtype": "float32", "skew": 0.0, "direction": "forward"},
    {**_SMOKE, "name": "smoke_both", "dtype": "float16", "skew": 1.0, "direction": "both"},
    {**_SMOKE, "name": "smoke_odd", "dtype": "float32", "tokens": 23, "width": 65, "inner": 17, "experts": 5}
    | {"choices": 3, "skew": 2.0, "direction": "both"},
    {**_MIXTRAL, "name": "mixtral_decode64", "tier": "quick", "tokens": 64, "skew": 0.0, "direction": "forward"},
    {**_QWEN3, "name": "qwen3_decode64", "tier": "quick", "tokens": 64, "skew": 0.0, "direction": "forward"},
    {**_MIXTRAL, "name": "mixtral_4k_both", "tier": "quick", "tokens": 4096, "skew": 0.0, "direction": "both"},
    {**_QWEN3, "name": "qwen3_4k_fwd", "tier": "quick", "tokens": 4096, "skew": 0.0, "direction": "forward"},
    {**_QWEN3, "name": "qwen3_4k_both", "tier": "quick", "tokens": 4096, "skew": 0.0, "direction": "both"},
    {**_MIXTRAL, "name": "mixtral_4k_fwd", "tier": "full", "tokens": 4096, "skew": 0.0, "direction": "forward"},
    {**_MIXTRAL, "name": "mixtral_16k_both", "tier": "full", "tokens": 16384, "skew": 0.0, "direction": "both"},
    {**_QWEN3, "name": "qwen3_16k_fwd", "tier": "full", "tokens": 16384, "skew": 0.0, "direction": "forward"},
    {**_QWEN3, "name": "qwen3_16k_both", "tier": "full", "tokens": 16384, "skew": 0.0, "direction": "both"},
    {**_QWEN3, "name": "qwen3_16k_skewed", "tier": "full", "tokens": 16384, "skew": 1.0, "direction": "both"},
    {**_QWEN3, "name": "qwen3_decode64_skewed", "tier": "full", "tokens": 64, "skew": 1.0, "direction": "forward"},
]


class MoeGroupedExperts(PairSuite):
    """asv's view of moe_grouped_experts."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
