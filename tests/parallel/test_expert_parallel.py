"""Expert parallelism on real gloo ranks: equal to one process, bytes as counted from the routing, even or one-sided."""

import json
import os
from math import comb
from pathlib import Path

import pytest
import torch

from harness import discover
from harness.launch import Job, launch
from harness.pair import Context
from harness.workload import parse_workload
from impls.moe.routing import draw_routing
from impls.parallel import expert_bytes, expert_parallel
from impls.parallel.token_exchange import add_up, make_plans

WORKERS = Path(__file__).parent / "workers"
SEED = 7  # the worker's
BOUND = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-4}
EVEN = {"tokens": 32, "width": 16, "inner": 24, "experts": 8, "choices": 2, "skew": 0.0}
SIZES = {
    "even": EVEN,
    "odd": {"tokens": 23, "width": 13, "inner": 7, "experts": 5, "choices": 3, "skew": 1.0},
    "one_sided": {
        **EVEN,
        "choices": 1,
        "skew": 12.0,
    },  # every token to the first expert
    "few": {**EVEN, "tokens": 4, "experts": 4},  # a chunk, and on four ranks a rank, of a token or none
}
VARIANTS = ("baseline", "optimized", "overlapped")
BAD = [
    ({**EVEN, "experts": 1, "choices": 1}, "1 experts leave some of"),
    ({**EVEN, "tokens": 1}, "1 tokens leave some of"),
    ({**EVEN, "choices": 9}, "cannot choose 9 of 8 experts"),
]


def cases(dtypes):
    return [
        {"key": f"{variant}-{size}-{dtype}", "technique": "expert_parallel", "variant": variant, "dtype": dtype}
        | {"dims": dims, "counters": size == "even" and dtype == "float32"}
        for variant in VARIANTS
        for size, dims in SIZES.items()
        for dtype in dtypes
    ]


def extra_cases():
    one = {"technique": "expert_parallel", "dtype": "float32"}
    bad = [one | {"key": f"bad{n}", "variant": "optimized", "dims": dims} for n, (dims, _) in enumerate(BAD)]
    return bad + [one | {"key": f"muted-{v}", "variant": v, "muted": True, "dims": EVEN} for v in VARIANTS]


def answers(folder, ranks, wanted, device="cpu"):
    asked, told = folder / "cases.json", folder / "answers.json"
    asked.write_text(json.dumps(wanted))
    path = os.pathsep.join([str(WORKERS), os.environ.get("PYTHONPATH", "")])
    found = launch(
        Job("equal_worker", (str(asked), str(told), device), ranks, 240, folder / "logs", {"PYTHONPATH": path})
    )
    assert found.status == "passed", f"{found.reason}\n{found.traceback}"
    return json.loads(told.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("two"), 2, [*cases(["float32"]), *extra_cases()])


@pytest.fixture(scope="module")
def two_others(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("others"), 2, cases(["float64", "bfloat16"]))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return answers(tmp_path_factory.mktemp("four"), 4, cases(["float32", "float64"]))


def workload(ranks, dtype="float32", **dims):
    raw = {"name": "test", "tier": "smoke", "dtype": dtype, **dims, "ranks": ranks}
    return parse_workload("expert_parallel", raw, "test")


def experts_of(case, ranks):
    dtype = getattr(torch, case["dtype"])
    one = workload(ranks, case["dtype"], **case["dims"])
    return expert_parallel.inputs(one, Context(torch.device("cpu"), dtype, SEED))["experts"]


def judge(case, answer, ranks):
    assert answer["names"][0] == answer["names"][1] == ["grad.down", "grad.gate_up", "grad.router", "grad.x", "out"]
    bound = BOUND[case["dtype"]]
    wrong = {name: error for name, error in answer["errors"].items() if isinstance(error, str) or not error <= bound}
    assert not wrong
    assert answer["repeats"], "a second load and the same step gave other numbers"
    one = workload(ranks, case["dtype"], **case["dims"])
    expected = expert_bytes.routed_bytes(one, case["variant"], experts_of(case, ranks))
    assert answer["counters"]["link_bytes"] == expected


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


@pytest.mark.multi_gpu
def test_two_gpus(tmp_path):
    wanted = cases(["float32", "bfloat16"])
    told = answers(tmp_path, 2, wanted, "cuda")
    for case in wanted:
        judge(case, told[case["key"]], 2)


@pytest.mark.parametrize(("number", "words"), [(n, words) for n, (_, words) in enumerate(BAD)])
def test_what_cannot_be_is_refused_by_every_rank(number, words, two):
    assert words in two[f"bad{number}"]["refused"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_left_out_communication_is_found_wrong(variant, two):
    assert max(two[f"muted-{variant}"]["errors"].values()) > 1e-2


@pytest.mark.parametrize("variant", VARIANTS)
def test_exposed_communication_is_measured(variant, two):
    found = two[f"{variant}-even-float32"]["counters"]
    assert found["exposed_comm"] == max(0.0, found["step_s"] - found["compute_s"])
    assert found["comm_s"] > 0
    assert found["hidden_share"] == max(0.0, 1 - found["exposed_comm"] / found["comm_s"])


def test_one_sided_routing_leaves_a_rank_without_a_token():
    goes = expert_bytes.elsewhere(experts_of({"dims": SIZES["one_sided"], "dtype": "float32"}, 2), 8, 2)
    assert goes == [[16, 0], [16, 0]]


def test_bytes_of_known_choices_are_counted_by_hand():
    one = workload(2, tokens=4, width=10, inner=1, experts=4, choices=2, skew=0.0)
    choices = torch.tensor([[0, 1], [0, 3], [2, 3], [1, 0]])  # experts 0, 1 and tokens 0, 1 are rank 0's
    assert expert_bytes.elsewhere(choices, 4, 2) == [[2, 1], [1, 1]]
    row, numbers, counts = (2 * 10 + 2) * 4, 4 * 2, 16
    assert expert_bytes.routed_bytes(one, "optimized", choices) == 2 * row + numbers + counts
    assert expert_bytes.routed_bytes(one, "overlapped", choices) == 2 * row + numbers + 2 * counts
    assert expert_bytes.routed_bytes(one, "baseline", choices) == 2 * (4 * 10 * 4 + 2 * (8 + 2 * 4))
    for count in (
        lambda v: expert_bytes.link_bytes(one, v),
        lambda v: expert_bytes.routed_bytes(one, v, choices),
    ):
        with pytest.raises(ValueError, match="not counted here"):
            count("other")


@pytest.mark.parametrize(("ranks", "skew"), [(2, 0.0), (8, 0.0), (8, 1.0)])
def test_expected_bytes_are_those_of_many_tokens(ranks, skew):
    one = workload(ranks, tokens=4096, width=64, inner=1, experts=64, choices=4, skew=skew)
    drawn = draw_routing(one, Context(torch.device("cpu"), torch.float32, SEED), salt=2)[0]
    for variant in VARIANTS:
        counted = expert_bytes.routed_bytes(one, variant, drawn)
        assert expert_bytes.link_bytes(one, variant) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("ranks", "experts", "choices", "chance"), [(2, 128, 8, 0.997), (2, 8, 2, 0.79), (8, 8, 2, 0.25)]
)
def test_chances_are_those_of_the_docstring(ranks, experts, choices, chance):
    one = workload(ranks, tokens=64, experts=experts, choices=choices, skew=0.0)
    assert expert_bytes.reach(one)[0] == pytest.approx(chance, abs=5e-3)
    assert expert_bytes.reach(one)[0] == 1 - comb(experts - experts // ranks, choices) / comb(experts, choices)


def test_every_workload_sends_less_than_the_plain_way_and_is_counted():
    technique = discover.find("expert_parallel")
    for one in discover.workloads_of(technique):
        assert 0 < expert_parallel.PAIR.work(one).link_bytes < expert_bytes.link_bytes(one, "baseline")
        assert expert_parallel.predict(one) > 1
        assert one.tier != "smoke" or one.ranks == 2


def test_rows_of_a_token_are_added_in_float32():
    rows = torch.tensor([[2048.0], [1.0], [1.0]], dtype=torch.float16)
    slots = torch.tensor([[0, 1, 2], [-1, -1, 1], [-1, -1, -1]], dtype=torch.int32)
    assert add_up(rows, slots).tolist() == [[2050.0], [1.0], [0.0]]
    assert add_up(rows[:0], slots[2:]).tolist() == [[0.0]]


class _Watched:
    """A link to oneself that says what is on its way."""

    rank, world, muted = 0, 1, False

    def __init__(self):
        self.moving = 0

    def all_to_all(self, out, x):
        """The counts, which are there at once."""
        out.copy_(x)
        self.moving += 1
        return self

    def exchange_rows(self, out, x, received, sent):
        assert received == sent
        out.copy_(x)
        self.moving += 1
        return self

    def wait(self):
        self.moving -= 1


def test_of_a_second_step_s_plans_only_the_counts_pass_between_host_and_device():
    """What is made of the host's numbers holds the host until all before it is done, as what is read from the device
    does. All is launched before the counts are waited for: what comes after is views of it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Told(_Watched):
        def wait(self):
            names.append("wait")

    names = []
    experts = torch.tensor([[0, 5], [2, 3], [7, 1]])
    first = make_plans(Told(), experts, 8, 2, None)
    names.clear()
    with Seen():
        second = make_plans(Told(), experts, 8, 2, None)
    assert not {"lift_fresh", "_local_scalar_dense", "nonzero", "item"} & set(names)
    assert set(names[names.index("wait") + 1 :]) <= {"stack", "slice"}
    assert [plan.experts_sK.tolist() for plan in second] == [plan.experts_sK.tolist() for plan in first]


@pytest.mark.parametrize(("chunks", "moving"), [(1, [0, 0]), (2, [3, 1, 1, 1])])
def test_a_chunk_is_computed_while_another_travels_there_and_back(chunks, moving, monkeypatch):
    """On the way are the second's experts, router and tokens, then the first's results; backward the gradients of the
    first's results, then of the second's tokens (the router has none here)."""
    link, seen = _Watched(), []

    class Looked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(link.moving)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append(link.moving)
            return grad * 2

    monkeypatch.setattr(expert_parallel, "local_experts", lambda x, *_: Looked.apply(x))
    case = object.__new__(expert_parallel.Exchanged)
    case.link, case.chunks, case.plans, case.workload = link, chunks, [], workload(1, **EVEN)
    x, router = torch.randn(6, 16, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    out = case.layer(x, torch.zeros(6, 2, dtype=torch.long), router, torch.zeros(8, 2, 16), torch.zeros(8, 16, 1))
    (grad,) = torch.autograd.grad(out.sum(), [x])
    assert torch.equal(out, 2 * x)
    assert torch.equal(grad, torch.full_like(x, 2.0))
    assert seen == moving
    assert link.moving == 0
