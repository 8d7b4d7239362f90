"""Context parallelism on real gloo ranks: what a rank keeps for backward falls with N by the formula of the pair, and
the step's communication is told apart from it."""

import json
import os
from pathlib import Path

import pytest
import torch

from harness.launch import Job, launch
from harness.workload import parse_workload
from impls.parallel.context_parallel import saved_formula
from impls.parallel.saved import saved_bytes

WORKERS = Path(__file__).parent / "workers"
DIMS = {"layers": 2, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4, "vocab": 257, "batch": 2, "seq": 64}
VARIANTS = ("baseline", "optimized", "ulysses")
DTYPES = ("float32", "bfloat16")
#: The last id of each row, which the baseline keeps with the row; the loss, and what it is divided by.
ODDS_AND_ENDS = 8 * DIMS["batch"] + 16


def told(folder, ranks, dtypes):
    cases = [
        {"key": f"{variant}-{dtype}", "variant": variant, "dtype": dtype, "dims": DIMS}
        for variant in VARIANTS
        for dtype in dtypes
    ]
    asked, answer = folder / "cases.json", folder / "answer.json"
    asked.write_text(json.dumps(cases))
    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    found = launch(Job("memory_worker", (str(asked), str(answer)), ranks, 120, folder / "logs", {"PYTHONPATH": path}))
    assert found.status == "passed", f"{found.reason}\n{found.traceback}"
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return told(tmp_path_factory.mktemp("memory2"), 2, DTYPES[:1])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return told(tmp_path_factory.mktemp("memory4"), 4, DTYPES)


def judge_memory(found, ranks, dtypes):
    for dtype in dtypes:
        raw = {"name": "test", "tier": "smoke", "dtype": dtype, **DIMS, "ranks": ranks}
        workload = parse_workload("context_parallel", raw, "test")
        for variant in VARIANTS:
            over = found[f"{variant}-{dtype}"]["saved_bytes"] - saved_formula(workload, variant)
            assert 0 <= over <= ODDS_AND_ENDS, (variant, dtype, over)
        whole, ring = (found[f"{variant}-{dtype}"]["saved_bytes"] for variant in VARIANTS[:2])
        assert whole / ring == pytest.approx(ranks, rel=1e-3)


def judge_communication(found, dtypes):
    for variant in VARIANTS[1:]:
        for dtype in dtypes:
            one = found[f"{variant}-{dtype}"]
            assert one["communicated"] == one["link_bytes"] > 0
            assert one["comm_s"] > 0
            assert one["exposed_comm"] == max(0.0, one["step_s"] - one["compute_s"])
            assert one["hidden_share"] == max(0.0, 1 - one["exposed_comm"] / one["comm_s"])


def test_two_ranks_keep_half(two):
    judge_memory(two, 2, DTYPES[:1])


def test_communication_alone_sends_what_a_step_sends_and_its_hidden_share_is_told(two):
    judge_communication(two, DTYPES[:1])


@pytest.mark.slow
def test_four_ranks_keep_a_quarter(four):
    judge_memory(four, 4, DTYPES)
    judge_communication(four, DTYPES)


def test_a_variant_that_is_not_counted_is_refused():
    raw = {"name": "test", "tier": "smoke", "dtype": "float32", **DIMS, "ranks": 2}
    with pytest.raises(ValueError, match="what 'torch_cp' keeps is not counted here"):
        saved_formula(parse_workload("context_parallel", raw, "test"), "torch_cp")


def test_views_count_once_and_weights_not():
    weight = torch.ones(4, 4, requires_grad=True)
    x = torch.ones(8, 4)

    def run():
        first, second = x[:4] @ weight, x[4:] @ weight
        (first * second).sum().backward()

    assert saved_bytes(run, [weight]) == x.nbytes + 2 * 16 * 4
