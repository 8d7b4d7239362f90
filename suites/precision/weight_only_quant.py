"""Workloads of weight_only_quant: linear layers of Llama-3-8B, a few tokens each; ``group`` 0: a channel's scale."""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "dtype": "float32", "tokens": 3, "outputs": 96, "inputs": 256}
_UP: dict[str, Any] = {"dtype": "bfloat16", "outputs": 14336, "inputs": 4096}
_DOWN: dict[str, Any] = {"dtype": "bfloat16", "outputs": 4096, "inputs": 14336}
_INT8 = {"bits": 8, "group": 0}
_INT4 = {"bits": 4, "group": 128}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_int8", **_INT8},
    {**_SMOKE, "name": "smoke_int4", **_INT4},
    {**_SMOKE, "name": "smoke_odd", "dtype": "float16", "tokens": 5, "outputs": 37, "inputs": 333, **_INT4},
    {**_UP, "name": "up_b1_int8", "tier": "quick", "tokens": 1, **_INT8},
    {**_UP, "name": "up_b1_int4", "tier": "quick", "tokens": 1, **_INT4},
    {**_UP, "name": "up_b16_int8", "tier": "quick", "tokens": 16, **_INT8},
    {**_UP, "name": "up_b16_int4", "tier": "quick", "tokens": 16, **_INT4},
    {**_UP, "name": "up_b8_int8", "tier": "full", "tokens": 8, **_INT8},
    {**_UP, "name": "up_b8_int4", "tier": "full", "tokens": 8, **_INT4},
    {**_UP, "name": "up_b64_int8", "tier": "full", "tokens": 64, **_INT8},
    {**_UP, "name": "up_b64_int4", "tier": "full", "tokens": 64, **_INT4},
    {**_UP, "name": "up_b256_int8", "tier": "full", "tokens": 256, **_INT8},
    {**_UP, "name": "up_b256_int4", "tier": "full", "tokens": 256, **_INT4},
    {**_DOWN, "name": "down_b1_int8", "tier": "full", "tokens": 1, **_INT8},
    {**_DOWN, "name": "down_b1_int4", "tier": "full", "tokens": 1, **_INT4},
    {**_DOWN, "name": "down_b8_int4", "tier": "full", "tokens": 8, **_INT4},
    {**_DOWN, "name": "down_b64_int4", "tier": "full", "tokens": 64, **_INT4},
    {**_DOWN, "name": "down_b256_int4", "tier": "full", "tokens": 256, **_INT4},
]


class WeightOnlyQuant(PairSuite):
    """asv's view of weight_only_quant."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
