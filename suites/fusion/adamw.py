"""Workloads of adamw: the tensors of a Llama-family model of a billion parameters, few or many, and of small ones."""

from typing import Any

from suites.pair_suite import PairSuite

_SMOKE: dict[str, Any] = {"tier": "smoke", "layers": 1, "width": 32, "inner": 72, "kv": 8, "vocabulary": 101}
_BILLION: dict[str, Any] = {"layers": 16, "width": 2048, "inner": 8192, "kv": 512, "vocabulary": 32000}
_NARROW: dict[str, Any] = {"layers": 1000, "width": 256, "inner": 1024, "kv": 64, "vocabulary": 1000}
_SMALL: dict[str, Any] = {"layers": 300, "width": 64, "inner": 128, "kv": 16, "vocabulary": 1000}

WORKLOADS = [
    {**_SMOKE, "name": "smoke_f32", "dtype": "float32"},
    {**_SMOKE, "name": "smoke_master", "dtype": "float16"},
    {**_BILLION, "name": "1b_master", "tier": "quick", "dtype": "bfloat16"},
    {**_BILLION, "name": "1b_f32", "tier": "full", "dtype": "float32"},
    {**_NARROW, "name": "1b_many", "tier": "full", "dtype": "bfloat16"},
    {**_SMALL, "name": "many_small", "tier": "full", "dtype": "bfloat16"},
]


class Adamw(PairSuite):
    """asv's view of adamw."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
