"""Workloads of speculative_decoding: rows, prompts and answers, how many tokens are drafted, and what text it is.

With real weights, a text that is repeated, and texts that are continued: rows of four texts, since how often drafts are
right differs widely from one to the next. Random weights of a large model, on which drafts are right at a rate that is
set: batches from one row to where arithmetic binds.
"""

from suites.pair_suite import PairSuite

TINY = {
    "model": "tiny",
    "dtype": "float32",
    "task": "continue",
    "rows": 2,
    "prompt": 32,
    "new": 32,
    "drafts": 4,
    "ngram": 3,
    "draft_layers": 1,
}
REAL = {
    **TINY,
    "model": "smollm2-135m-instruct",
    "text": "pydoc",
    "rows": 1,
    "prompt": 160,
    "new": 64,
    "draft_layers": 10,
}
LARGE = {
    **TINY,
    "model": "llama-3-8b",
    "dtype": "bfloat16",
    "prompt": 512,
    "new": 128,
    "draft_layers": 8,
    "acceptance": 0.7,
}

WORKLOADS = [
    {**TINY, "name": "tiny", "tier": "smoke", "acceptance": 0.7},
    {**REAL, "name": "real_repeat", "tier": "quick", "task": "repeat"},
    {**REAL, "name": "real_repeat_batch4", "tier": "quick", "task": "repeat", "rows": 4},
    {**REAL, "name": "real_continue_batch4", "tier": "quick", "rows": 4},
    {**LARGE, "name": "8b_batch1", "tier": "full", "rows": 1},
    {**LARGE, "name": "8b_batch8", "tier": "full", "rows": 8},
    {**LARGE, "name": "8b_batch64", "tier": "full", "rows": 64},
]


class SpeculativeDecoding(PairSuite):
    """asv's view of speculative_decoding."""

    def setup_cache(self) -> object:
        """Measures every workload of the tier, once for all metrics."""
        return self.measure()
