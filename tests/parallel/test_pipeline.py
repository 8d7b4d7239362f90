"""Pipelines on real gloo ranks: five AdamW steps are those of one process, bytes and activations are those of the
schedule, and what ranks idle is what the formula says."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.discover import find, workloads_of
from harness.launch import Job, launch
from harness.pair import Context, Inputs
from harness.workload import parse_workload
from impls.parallel import shared
from impls.parallel.pipeline_parallel import PAIR, inputs, link_bytes, predict, schedule_of
from impls.parallel.pipeline_schedule import Compute, in_step, interleaved, live_peaks, makespan, one_f_one_b
from impls.parallel.pipeline_stage import Kept, Part, cut, idleness, stage_costs, stage_of, wide_sums

ROOT = Path(__file__).parent.parent.parent
WORKERS = Path(__file__).parent / "workers"
BOUND = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-4}
OURS = ("baseline", "optimized", "gpipe", "interleaved")
EVEN = {"layers": 4, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 4, "vocab": 257} | {
    "batch": 8,
    "seq": 16,
    "micro_batches": 4,
    "chunks": 2,
}
#: No number of stages divides the layers.
ODD = {"layers": 5, "width": 42, "ffn": 101, "heads": 3, "kv_heads": 1, "vocab": 127} | {
    "batch": 6,
    "seq": 13,
    "micro_batches": 6,
    "chunks": 2,
}
EVEN_4 = {**EVEN, "layers": 8}
ODD_4 = {**ODD, "layers": 9, "batch": 8, "micro_batches": 8}
#: Fewer micro-batches than ranks.
FEW = {**ODD, "layers": 7, "batch": 9, "micro_batches": 3}


def workload(dims, ranks, dtype="float32"):
    raw = {"name": "test", "tier": "smoke", "dtype": dtype, **dims, "ranks": ranks}
    return parse_workload("pipeline_parallel", raw, "test")


def cases(sizes, dtypes, variants=tuple(PAIR.variants), counters=()):
    return [
        {"key": f"{variant}-{name}-{dtype}", "technique": "pipeline_parallel", "variant": variant, "dtype": dtype}
        | {"dims": dims, "counters": variant in counters}
        for (name, dims), dtype, variant in itertools.product(sizes.items(), dtypes, variants)
    ]


TWO = [
    *cases({"even": EVEN}, ["float32"], counters=OURS),
    *cases({"odd": ODD}, ["float32"], ("baseline", "gpipe")),
    *cases({"odd": ODD}, ["float64"], ("optimized", "interleaved")),
    *cases({"even": EVEN}, ["bfloat16"], ("optimized",)),
]
FOUR = [
    *cases({"even": EVEN_4}, ["float32"], counters=OURS),
    *cases({"odd": ODD_4}, ["float32"], ("baseline", "torch_pipelining")),
    *cases({"odd": ODD_4}, ["float64"], ("optimized", "interleaved")),
    *cases({"few": FEW}, ["float32"], ("optimized", "gpipe")),
]
ALONE = {"technique": "pipeline_parallel", "dtype": "float32"}
MUTED = {**ALONE, "key": "muted", "variant": "optimized", "dims": EVEN, "muted": True}
MUTED_4 = [
    {**ALONE, "key": f"muted-{variant}", "variant": variant, "dims": EVEN_4, "muted": True}
    for variant in ("baseline", "gpipe", "interleaved")
]
NAPS = [{**ALONE, "key": f"nap-{variant}", "variant": variant, "dims": EVEN, "nap": 0.008} for variant in OURS]
PEER = {**ALONE, "key": "kept-torch", "variant": "torch_pipelining", "dims": EVEN, "nap": 0}
BAD = {
    "rows": ({**EVEN, "batch": 7}, "a batch of 7 rows does not divide into 4 micro-batches"),
    "layers": ({**EVEN, "layers": 1}, "1 layers do not make 2 stages: each needs a layer"),
    "tied": ({**EVEN, "tied": True}, "tied embeddings would lie on the first and on the last rank"),
}
REFUSED = [{**ALONE, "key": key, "variant": "optimized", "dims": dims} for key, (dims, _) in BAD.items()]


def told(folder, ranks, wanted):
    asked, answer = folder / "cases.json", folder / "answer.json"
    asked.write_text(json.dumps(wanted))
    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    found = launch(Job("pipeline_worker", (str(asked), str(answer)), ranks, 240, folder / "logs", {"PYTHONPATH": path}))
    assert found.status == "passed", f"{found.reason}\n{found.traceback}"
    return json.loads(answer.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return told(tmp_path_factory.mktemp("two"), 2, [*TWO, MUTED, *NAPS, PEER, *REFUSED])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return told(tmp_path_factory.mktemp("four"), 4, [*FOUR, *MUTED_4])


def judge(case, answer, ranks):
    names_of_one, names = answer["names"]
    assert names == names_of_one
    assert any(name.startswith("grad.") for name in names)
    bound = BOUND[case["dtype"]]
    wrong = {name: error for name, error in answer["errors"].items() if isinstance(error, str) or not error <= bound}
    assert not wrong
    assert answer["repeats"], "a second load and the same steps gave other numbers"
    if case["variant"] in OURS:
        w = workload(case["dims"], ranks, case["dtype"])
        assert answer["counters"]["link_bytes"] == link_bytes(w, case["variant"])
        if case["variant"] == "optimized":
            assert answer["work"] == answer["counters"]["link_bytes"]


@pytest.mark.parametrize("case", TWO, ids=lambda case: case["key"])
def test_two_ranks(case, two):
    judge(case, two[case["key"]], 2)


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR, ids=lambda case: case["key"])
def test_four_ranks(case, four):
    judge(case, four[case["key"]], 4)


def test_left_out_communication_is_found_wrong(two):
    assert max(two["muted"]["errors"].values()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", MUTED_4, ids=lambda case: case["variant"])
def test_left_out_communication_is_found_wrong_on_four_ranks(case, four):
    assert max(four[case["key"]]["errors"].values()) > 1e-2


@pytest.mark.parametrize(("key", "words"), [(key, words) for key, (_, words) in BAD.items()])
def test_what_cannot_be_is_refused_by_every_rank(key, words, two):
    assert words in two[key]["refused"]


def judge_kept(found, dims, ranks):
    """Bytes kept are those of one micro-batch times the schedule's live ones, on every rank, to the byte."""
    w = workload(dims, ranks)
    kept = {
        variant: [found[f"{variant}-even-float32"]["counters"][f"activation_bytes_rank{r}"] for r in range(ranks)]
        for variant in OURS
    }
    for variant in ("optimized", "gpipe"):
        live = live_peaks(schedule_of(w, variant))
        assert [kept[variant][r] * w.micro_batches for r in range(ranks)] == [
            kept["gpipe"][r] * live[r] for r in range(ranks)
        ]
        assert found[f"{variant}-even-float32"]["counters"]["activation_bytes"] == max(kept[variant])
    # The baseline's whole batch is all micro-batches, but for a count of targets that each loss keeps.
    assert kept["gpipe"] == pytest.approx(kept["baseline"], rel=1e-4)
    for r, live in enumerate(live_peaks(interleaved(ranks, w.micro_batches, 2))):
        layers = [len(cut(w, 2 * ranks)[stage]) for stage in (r, r + ranks)]
        assert kept["interleaved"][r] > kept["optimized"][r]
        if layers[0] == layers[1] and r < ranks - 1:  # equal chunks, no head among them
            assert kept["interleaved"][r] == pytest.approx(kept["gpipe"][r] * live / w.micro_batches / 2, rel=0.05)


def test_activations_kept_on_two_ranks(two):
    judge_kept(two, EVEN, 2)
    ours, theirs = (two[key]["counters"] for key in ("optimized-even-float32", "kept-torch"))
    assert "activation_bytes_rank1" in theirs
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.slow
def test_activations_kept_on_four_ranks(four):
    judge_kept(four, EVEN_4, 4)


@pytest.mark.parametrize("variant", OURS)
def test_ranks_idle_as_the_formula_says_where_computation_is_all_that_takes_time(variant, two):
    expected = {"baseline": 1 / 2, "optimized": 1 / 5, "gpipe": 1 / 5, "interleaved": 1 / 9}[variant]
    told = two[f"{variant}-even-float32"]["counters"]
    assert told["bubble_formula"] == pytest.approx(expected)
    for found in [told, *two[f"nap-{variant}"]["steps"]]:
        assert 0 <= found["exposed_comm"] < found["pipeline_s"]
        assert 0 < found["compute_s"] < found["pipeline_s"]
        assert 0 < found["bubble"] < 1
    # Messages and other processes only make ranks wait longer.
    assert expected - 0.02 < min(found["bubble"] for found in two[f"nap-{variant}"]["steps"]) < expected + 0.12


def test_micro_batches_shorten_a_step_as_predicted(two):
    naive, ours = (
        min(found["pipeline_s"] for found in two[f"nap-{variant}"]["steps"]) for variant in ("baseline", "optimized")
    )
    assert naive / ours == pytest.approx(2 * 4 / 5, rel=0.2)


def test_idle_share_and_exposed_time_are_counted_from_what_ranks_computed():
    schedule = one_f_one_b(2, 4)
    taken = [{one: 0.1 * in_step(one) for one in order} for order in schedule.orders()]
    found = idleness(schedule, 1.5, taken)
    assert found["bubble"] == pytest.approx(1 / 5)
    assert found["imbalance"] == pytest.approx(0)
    assert found["compute_s"] == pytest.approx(1.2)
    assert found["exposed_comm"] == pytest.approx(0)
    later = idleness(schedule, 1.7, [taken[0], {one: seconds / 2 for one, seconds in taken[1].items()}])
    assert later["bubble"] == pytest.approx(1 - (1.2 + 0.6) / 2 / 1.7)
    assert later["imbalance"] == pytest.approx(1 / 4)
    assert later["exposed_comm"] == pytest.approx(1.7 - (1.2 + 0.05))  # rank 0 waits for the other's first backward


def test_layers_are_cut_where_the_costliest_stage_costs_least():
    for layers, stages, vocab in itertools.product((4, 7, 9), (2, 3, 4), (5, 257, 3000)):
        w = workload({**EVEN, "layers": layers, "vocab": vocab}, 2)
        sizes = [len(one) for one in cut(w, stages)]
        assert [layer for one in cut(w, stages) for layer in one] == list(range(layers))
        ways = (one for one in itertools.product(range(1, layers), repeat=stages) if sum(one) == layers)
        assert max(stage_costs(w, sizes)) == min(max(stage_costs(w, way)) for way in ways)


def test_costs_of_stages_are_the_flops_of_a_step():
    w = workload(EVEN, 2)
    forward = shared.train_flops(w) / 3 / (w.batch * w.seq)
    assert sum(stage_costs(w, [1, 3])) == pytest.approx(forward)


def test_the_ranks_hold_every_parameter_once_under_its_own_name():
    w, context = workload(ODD, 2), Context(torch.device("cpu"), torch.float32, 1)
    names = [name.removeprefix("weight.") for name in inputs(w, context) if name != "tokens"]
    for ranks, stages in ((2, 2), (2, 4), (4, 4)):
        cuts = cut(w, stages)
        parts = [Part(shared.model_config(w), cuts, range(rank, stages, ranks), context) for rank in range(ranks)]
        held = [name for part in parts for name, _ in part.named_parameters()]
        assert sorted(held) == sorted(names)
        for rank, part in enumerate(parts):
            assert all(stage_of(name, cuts) % ranks == rank for name, _ in part.named_parameters())


def test_the_oracle_is_the_plain_step_of_the_whole_batch():
    w, context = workload(FEW, 2, "float64"), Context(torch.device("cpu"), torch.float64, 3)
    drawn = Inputs(inputs(w, context), 3)
    results = []
    for case in (PAIR.oracle(w, context), shared.OneProcess(w, context)):
        case.load(drawn)
        for _ in range(PAIR.check_runs):
            case.run()
        results.append(case.result())
    assert results[0].keys() == results[1].keys()
    for name, plain in results[1].items():
        torch.testing.assert_close(results[0][name], plain, rtol=1e-11, atol=1e-13)


def test_what_is_kept_counts_views_once_and_is_gone_after_backward():
    weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(8, 4)
    kept = Kept([weight])
    with kept.watch():
        first = (x @ weight).exp()
        second = (x[:2] @ weight).sum()
    assert kept.now == kept.most == x.nbytes + first.nbytes
    first.sum().backward()
    assert kept.now == x.nbytes  # a view of it waits for the other backward
    second.backward()
    assert kept.now == 0
    assert kept.most == x.nbytes + first.nbytes


def test_gradients_of_micro_batches_are_summed_in_32_bits():
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    collected = wide_sums({"w": param}, {"w": torch.ones(1)})
    for _ in range(300):  # in bfloat16 the sum would stay at 256
        (param * 1).sum().backward()
    assert collected()["w"].tolist() == [300.0]
    with pytest.raises(RuntimeError, match="no gradient for w"):
        collected()


@pytest.mark.parametrize(
    ("variant", "dims", "ranks", "words"),
    [
        ("interleaved", {**EVEN, "micro_batches": 2}, 4, "2 micro-batches do not divide over 4 ranks"),
        ("interleaved", {**EVEN, "layers": 3}, 2, "3 layers do not make 4 stages"),
        ("interleaved", {**EVEN, "chunks": 1}, 2, "from 2 chunks a rank"),
        ("torch_pipelining", FEW, 4, "3 are fewer than 4"),
    ],
)
def test_what_a_variant_cannot_run_is_said(variant, dims, ranks, words):
    reason = PAIR.variant(variant).supports(workload(dims, ranks))
    assert reason is not None
    assert words in reason


def test_equal_stages_are_predicted_to_gain_what_the_paper_says():
    w = workload({**EVEN, "layers": 8, "vocab": 2}, 4)
    assert predict(w) == pytest.approx(4 * 4 / (4 + 3), rel=0.01)
    uneven = predict(workload({**EVEN, "layers": 3, "vocab": 2}, 2))
    assert uneven == pytest.approx(4 * 9 / (4 * 6 + 1), rel=0.01)  # the stage of two layers waits once


def test_the_workloads_have_stages_of_about_equal_cost_and_every_variant_runs_on_them():
    ranks = set()
    for w in workloads_of(find("pipeline_parallel")):
        ranks.add((w.tier, w.ranks))
        assert PAIR.variant("interleaved").supports(w) is None
        assert PAIR.variant("torch_pipelining").supports(w) is None
        assert PAIR.work(w).link_bytes == link_bytes(w, "gpipe") == link_bytes(w, "baseline")
        assert (PAIR.work(w).collective, PAIR.work(w).messages) == ("send_recv", 1 if w.ranks == 2 else 2)
        for stages in (w.ranks, w.ranks * w.chunks) if w.tier != "smoke" else ():
            costs = stage_costs(w, [len(one) for one in cut(w, stages)])
            assert min(costs) > 0.8 * max(costs)
    assert ranks == {("smoke", 2), ("quick", 2), ("full", 4), ("full", 8)}


def test_a_variant_that_is_not_ours_has_no_schedule():
    with pytest.raises(ValueError, match="'torch_pipelining' is not ours"):
        link_bytes(workload(EVEN, 2), "torch_pipelining")


def test_a_slow_stage_is_waited_for():
    schedule = one_f_one_b(2, 4)
    slow = makespan(schedule, lambda one: in_step(one) * (2 if one.stage else 1))
    assert slow == makespan(schedule, in_step) + 4 * 3 * 2 - 4 * 3
    assert Compute("forward", 1, 0) in schedule.orders()[1]


@pytest.mark.slow
def test_check_passes_on_two_ranks(tmp_path):
    environment = {**os.environ, "PAIRBENCH_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness", "check", "pipeline_parallel", "--tier", "smoke", "--device", "cpu"]
    found = subprocess.run([*command, "--json"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    records = [record for record in json.loads(found.stdout) if record["type"] == "measurement"]
    assert {record["variant"]: record["status"] for record in records} == dict.fromkeys(PAIR.variants, "passed")
