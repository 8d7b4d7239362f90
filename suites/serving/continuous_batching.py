"""Workloads of continuous_batching: all requests queued at time 0, answers of very different lengths."""

from suites.serving._shapes import AZURE, AZURE_SMALL, LARGE, REAL, TINY

WORKLOADS = [
    {**TINY, "name": "tiny", "tier": "smoke"},
    {**REAL, "name": "real", "tier": "quick"},
    {**AZURE_SMALL, "name": "real_azure", "tier": "quick", "time_scale": 1e-9},
    {**LARGE, "name": "8b_bf16", "tier": "full"},
    {**AZURE, "name": "8b_azure", "tier": "full", "request_rate": 1000000.0},
]
