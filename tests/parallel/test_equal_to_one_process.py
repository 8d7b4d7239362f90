"""Every strategy on real gloo ranks: what it computes equals one process, and its bytes are those of the formula.

All cases of one number of ranks run in one launch, since starting ranks costs more than running them.
"""

import importlib
import json
import os
from pathlib import Path

import pytest

from harness.launch import Job, launch
from harness.workload import parse_workload

WORKERS = Path(__file__).parent / "workers"
BOUND = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-4}

MODEL = {"layers": 2, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4, "vocab": 257}
DP = {**MODEL, "batch": 4, "seq": 16, "micro_batches": 1, "bucket_kib": 64}
DP_ODD = {**MODEL, "batch": 11, "seq": 13, "micro_batches": 2, "bucket_kib": 1}
TP = {**MODEL, "vocab": 256, "batch": 2, "seq": 16}
TP_ODD = {**MODEL, "ffn": 171, "batch": 3, "seq": 11}
CP = {**MODEL, "batch": 2, "seq": 32}
CP_ODD = {**MODEL, "batch": 3, "seq": 40}
DECODE = {**MODEL, "batch": 4, "context": 32}
DECODE_ODD = {**MODEL, "ffn": 171, "batch": 3, "context": 17}
OVERLAP = {"tokens": 64, "inner": 128, "width": 32, "chunks": 4}
OVERLAP_ODD = {"tokens": 101, "inner": 333, "width": 97, "chunks": 3}


def payload(op):
    return {"op": op, "pieces": 3, "payload": 8 * 4 * 3 * 5}


OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
#: technique, variant, its dimensions by name.
PLAN = [
    *(("data_parallel", v, {"even": DP, "odd": DP_ODD}) for v in ("baseline", "optimized", "coalesced", "ddp")),
    *(("tensor_parallel", v, {"even": TP, "odd": TP_ODD}) for v in ("baseline", "optimized")),
    *(("tensor_parallel", v, {"even": TP}) for v in ("sequence_parallel", "dtensor")),
    *(("context_parallel", v, {"even": CP, "odd": CP_ODD}) for v in ("baseline", "optimized", "ulysses")),
    *(("tp_decode", v, {"even": DECODE, "odd": DECODE_ODD}) for v in ("baseline", "gathered")),
    *(("overlap", v, {"even": OVERLAP, "odd": OVERLAP_ODD}) for v in ("baseline", "optimized", "even")),
    *(("collectives", v, {op: payload(op) for op in OPS}) for v in ("baseline", "optimized", "asynchronous")),
]
#: What each must refuse: technique, dimensions, words of the error.
BAD = [
    ("data_parallel", {**DP, "batch": 1}, "rows are too few"),
    ("data_parallel", {**DP, "heads": 7}, "7 heads do not divide the model's width of 64"),
    ("tensor_parallel", {**TP, "kv_heads": 1}, "key-value heads do not divide over"),
    ("tp_decode", {**DECODE, "heads": 1, "kv_heads": 1}, "heads do not divide over"),
    ("overlap", {**OVERLAP, "chunks": 65}, "cannot be cut into 65 chunks"),
    ("overlap", {**OVERLAP, "inner": 1}, "leaves some of"),
    ("collectives", {**payload("all_reduce"), "payload": 1000}, "take a multiple of"),
    ("collectives", payload("gather"), "unknown collective 'gather'"),
]
#: Techniques whose optimized variant, with all communication left out, must be found wrong.
MUTED = [
    ("data_parallel", DP),
    ("tensor_parallel", TP),
    ("context_parallel", CP),
    ("tp_decode", DECODE),
    ("overlap", OVERLAP),
]


def cases(dtypes):
    for technique, variant, sizes in PLAN:
        for name, dims in sizes.items():
            for dtype in dtypes:
                yield {
                    "key": f"{technique}-{variant}-{name}-{dtype}",
                    "technique": technique,
                    "variant": variant,
                    "dtype": dtype,
                    "dims": dims,
                    "counters": name == "even" and variant == "optimized",
                }


def extra_cases():
    for number, (technique, dims, _) in enumerate(BAD):
        yield {"key": f"bad{number}", "technique": technique, "variant": "optimized", "dtype": "float32", "dims": dims}
    for technique, dims in MUTED:
        variant = "gathered" if technique == "tp_decode" else "optimized"
        yield {"key": f"muted-{technique}", "technique": technique, "variant": variant, "muted": True} | {
            "dtype": "float32",
            "dims": dims,
        }


def answers(folder, ranks, wanted):
    asked, told = folder / "cases.json", folder / "answers.json"
    asked.write_text(json.dumps(wanted))
    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    found = launch(Job("equal_worker", (str(asked), str(told)), ranks, 240, folder / "logs", {"PYTHONPATH": path}))
    assert found.status == "passed", f"{found.reason}\n{found.traceback}"
    return json.loads(told.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("two"), 2, [*cases(["float32"]), *extra_cases()])


@pytest.fixture(scope="module")
def two_others(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("others"), 2, list(cases(["float64", "bfloat16"])))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("four"), 4, list(cases(["float32", "float64"])))


def link_bytes(case, ranks):
    """The formula of the variant, or of the pair where a module has one for all of its variants."""
    module = importlib.import_module(f"impls.parallel.{case['technique']}")
    raw = {"name": "test", "tier": "smoke", "dtype": case["dtype"], **case["dims"], "ranks": ranks}
    workload = parse_workload(case["technique"], raw, "test")
    if hasattr(module, "link_bytes"):
        return module.link_bytes(workload, case["variant"])
    return module.PAIR.work(workload).link_bytes


def judge(case, answer, ranks):
    names_of_one, names = answer["names"]
    assert names == names_of_one
    bound = 0.0 if case["technique"] == "collectives" else BOUND[case["dtype"]]
    wrong = {name: error for name, error in answer["errors"].items() if isinstance(error, str) or not error <= bound}
    assert not wrong
    if case["variant"] in ("ddp", "dtensor"):  # not over our link, and DDP cuts its buckets anew after the first step
        return
    assert answer["repeats"], "a second load and the same steps gave other numbers"
    expected = link_bytes(case, ranks)
    if case["technique"] == "data_parallel" and case["variant"] == "baseline":
        expected *= case["dims"]["micro_batches"]  # it has no no_sync
    assert answer["counters"]["link_bytes"] == expected
    if case["variant"] == "optimized":
        assert answer["work"] == expected


def by_key(dtypes):
    return [pytest.param(case, id=case["key"]) for case in cases(dtypes)]


@pytest.mark.parametrize("case", by_key(["float32"]))
def test_two_ranks(case, two):
    judge(case, two[case["key"]], 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_key(["float64", "bfloat16"]))
def test_two_ranks_in_other_precisions(case, two_others):
    judge(case, two_others[case["key"]], 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", by_key(["float32", "float64"]))
def test_four_ranks(case, four):
    judge(case, four[case["key"]], 4)


@pytest.mark.parametrize(("number", "words"), [(n, words) for n, (_, _, words) in enumerate(BAD)])
def test_what_cannot_be_is_refused_by_every_rank(number, words, two):
    assert words in two[f"bad{number}"]["refused"]


@pytest.mark.parametrize("technique", [technique for technique, _ in MUTED])
def test_left_out_communication_is_found_wrong(technique, two):
    assert max(two[f"muted-{technique}"]["errors"].values()) > 1e-2


def test_exposed_communication_is_measured(two):
    for key in ("data_parallel-optimized-even-float32", "overlap-optimized-even-float32"):
        found = two[key]["counters"]
        assert found["step_s"] > 0
        assert found["compute_s"] > 0
        assert found["exposed_comm"] == max(0.0, found["step_s"] - found["compute_s"])
        assert found["comm_s"] > 0
        assert found["hidden_share"] == max(0.0, 1 - found["exposed_comm"] / found["comm_s"])
