"""The routed experts against a dense formula in float64, every gradient: odd shapes, empty experts, skew, refusals."""

import weakref
from functools import partial

import pytest
import torch

import kernels.moe_experts as module
import kernels.moe_plan as plans
from kernels.moe_combine import combine
from kernels.moe_experts import moe_experts
from kernels.moe_plan import GROUPED_MM, HOPPER, LAID_OUT, MM, Shapes, Tile, choose, launch_shapes, library_takes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # the interpreter's
SHARED = 227 * 1024


def dense(x, experts, router, gate_up, down):
    """Every expert on every token, and the router's weight, which is zero where it was not chosen."""
    count = len(gate_up)
    weights = torch.nn.functional.one_hot(experts.clamp(0, count - 1), count).to(x) * router.unsqueeze(-1)
    weights = torch.where(((experts >= 0) & (experts < count)).unsqueeze(-1), weights, 0.0).sum(1)
    gate, up = torch.einsum("td,ehd->teh", x, gate_up).chunk(2, dim=-1)
    return torch.einsum("te,tef,edf->td", weights, gate * torch.sigmoid(gate) * up, down)


def drawn(tokens, choices, count, width, inner, dtype, experts=None):
    generator = torch.Generator().manual_seed(tokens + inner)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    if experts is None:
        experts = torch.rand(tokens, count, generator=generator).topk(choices, dim=1).indices
    router = torch.rand(tokens, choices, generator=generator)
    tensors = [normal(tokens, width), router, normal(count, 2 * inner, width) / width**0.5]
    tensors = [t.to(dtype).to(DEVICE) for t in (*tensors, normal(count, width, inner) / inner**0.5)]
    return experts.to(DEVICE), tensors, normal(tokens, width).to(dtype).to(DEVICE)


def check(experts, tensors, grad, assert_near, units, plan=None):
    def computed(function, leaves, grad):
        leaves = [t.clone().requires_grad_() for t in leaves]
        out = function(leaves[0], experts, *leaves[1:])
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    got = computed(partial(moe_experts, plan=plan), tensors, grad)
    want = computed(dense, [t.double() for t in tensors], grad.double())
    for mine, truth, tensor in zip(got, want, [tensors[0], *tensors], strict=True):
        assert mine.dtype == tensor.dtype
        assert_near(mine, truth, units)
    return got


@pytest.mark.parametrize(
    ("tokens", "choices", "count", "width", "inner", "dtype"),
    [
        (1, 1, 1, 8, 8, torch.float32),
        (20, 2, 3, 70, 33, torch.float32),
        (3, 3, 7, 33, 5, torch.float32),
        (9, 2, 4, 24, 17, torch.float16),
        (40, 2, 3, 70, 33, torch.float16),
    ],
    ids=str,
)
def test_equals_float64_with_every_gradient(tokens, choices, count, width, inner, dtype, assert_near):
    check(*drawn(tokens, choices, count, width, inner, dtype), assert_near, units=16 if dtype == torch.float32 else 4)


def test_bfloat16_and_its_interpreted_products(assert_near):
    check(*drawn(17, 2, 3, 40, 24, torch.bfloat16), assert_near, units=4 if DEVICE == "cuda" else 8)


def test_all_tokens_to_one_expert_of_which_others_are_empty(assert_near):
    experts = torch.full((70, 1), 2)
    case = drawn(70, 1, 4, 32, 16, torch.float16, experts)
    _, _, _, grad_gate_up, grad_down = check(*case, assert_near, units=4)
    for empty in (0, 1, 3):
        assert not grad_gate_up[empty].any()
        assert not grad_down[empty].any()


def test_experts_that_are_not_here_add_nothing(assert_near):
    experts = torch.tensor([[0, 5], [-1, 9], [1, 0], [7, 1]])  # two are here; the second token has none
    out, grad_x, grad_router, *_ = check(*drawn(4, 2, 2, 24, 16, torch.float32, experts), assert_near, units=16)
    assert not out[1].any()
    assert not grad_x[1].any()
    assert (grad_router != 0).tolist() == [[True, False], [False, False], [True, True], [False, True]]


def test_room_for_the_pairs_that_are_here_is_enough():
    experts = torch.tensor([[0, 5], [-1, 9], [1, 0], [7, 1]])
    experts, tensors, grad = drawn(4, 2, 2, 24, 16, torch.float32, experts)
    results = []
    for most in (None, 4):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = moe_experts(leaves[0], experts, *leaves[1:], most=most)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not moe_experts(tensors[0], experts, *tensors[1:], most=0).any()


def test_an_expert_chosen_twice_counts_twice(assert_near):
    check(*drawn(3, 2, 2, 16, 16, torch.float32, torch.tensor([[0, 0], [1, 0], [1, 1]])), assert_near, units=16)


def test_no_tokens():
    experts, tensors, grad = drawn(0, 2, 3, 16, 8, torch.float32)
    leaves = [t.requires_grad_() for t in tensors]
    out = moe_experts(leaves[0], experts, *leaves[1:])
    assert out.shape == (0, 16)
    for leaf, found in zip(leaves, torch.autograd.grad(out, leaves, grad), strict=True):
        assert found.shape == leaf.shape
        assert not found.any()


def test_the_same_to_the_bit_with_and_without_gradients_and_again():
    experts, tensors, grad = drawn(20, 2, 3, 24, 16, torch.float16)
    results = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = moe_experts(leaves[0], experts, *leaves[1:])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(moe_experts(tensors[0], experts, *tensors[1:]), results[0][0])


def test_only_what_is_asked_for_has_a_gradient():
    experts, tensors, grad = drawn(6, 2, 3, 16, 8, torch.float32)
    tensors[1].requires_grad_()
    moe_experts(tensors[0], experts, *tensors[1:]).backward(grad)
    assert [t.grad is not None for t in tensors] == [False, True, False, False]


def test_rows_apart_and_a_gradient_that_is_expanded(assert_near):
    experts, tensors, _ = drawn(6, 2, 3, 16, 8, torch.float32)
    wide = torch.zeros(6, 40, device=DEVICE)
    wide[:, :16] = tensors[0]
    tensors[0] = wide[:, :16]
    check(experts, tensors, torch.ones(1, 1, device=DEVICE).expand(6, 16), assert_near, units=16)


def test_a_nan_stays_with_its_tokens():
    experts, tensors, _ = drawn(9, 2, 3, 24, 16, torch.float32)
    tensors[0][4, 3] = float("nan")
    out = moe_experts(tensors[0], experts, *tensors[1:])
    assert out.isnan().any(1).tolist() == [token == 4 for token in range(9)]


@pytest.mark.parametrize(("turned", "columns"), [(False, 32), (True, 256)])
def test_both_ways_of_a_product_and_of_its_tiles_agree(turned, columns, monkeypatch, assert_near):
    tile = Tile(16, 32, 16, 4, 2, 3, turned=turned)
    plain = tile._replace(turned=False)
    back, weights = tile._replace(columns=16), plain._replace(rows=32)
    plan = Shapes(tile, tile, plain._replace(columns=columns), back, weights)
    sizes = (23, 2, 3, 41, 37) if columns < 37 else (7, 2, 2, 24, 150)
    check(*drawn(*sizes, torch.float16), assert_near, units=4, plan=plan)


OURS = Tile(16, 16, 16, 4, 2, 3)
PLANS = {
    "grouped_mm": Shapes(*[GROUPED_MM] * 5),
    "mm": Shapes(*[MM] * 5),
    "first ours": Shapes(OURS, MM, GROUPED_MM, MM, OURS),
    "last ours": Shapes(GROUPED_MM, OURS, OURS, GROUPED_MM, MM),
}
TO_ONE = [[2, 2]] * 70
UNEVEN = [[4, 1]] * 33 + [[1, 4], [0, 4]] + [[4, -1], [7, 1]]  # two experts without a token; two that are not here


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("experts", [TO_ONE, UNEVEN, None], ids=["to one", "uneven", "drawn"])
def test_every_plan_equals_float64_with_every_gradient(plan, experts, assert_near):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32  # what a device's library takes
    sizes = (len(experts or range(41)), 2, 5, 72, 40)
    experts = None if experts is None else torch.tensor(experts)
    _, _, _, *grads = check(*drawn(*sizes, dtype, experts), assert_near, units=4 if DEVICE == "cuda" else 16, plan=plan)
    if experts is not None:
        for grad in grads:
            assert not grad[[e for e in range(5) if not (experts == e).any()]].any()


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [TO_ONE, UNEVEN, None], ids=["to one", "uneven", "drawn"])
def test_the_plan_with_specialised_warps_equals_float64_with_every_gradient(experts, assert_near):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    sizes = (len(experts or range(410)), 2, 5, 520, 264)
    experts = None if experts is None else torch.tensor(experts)
    for plan in (LAID_OUT, Shapes(HOPPER, GROUPED_MM, HOPPER, MM, HOPPER)):
        check(*drawn(*sizes, torch.bfloat16, experts), assert_near, units=4, plan=plan)


def test_a_plan_of_tiles_with_different_rows_is_refused():
    with pytest.raises(ValueError, match=r"^plan: tiles of \[16, 128\] rows"):
        _ = Shapes(OURS, HOPPER, OURS, OURS, OURS).rows


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_keeps_a_nan_with_its_tokens_and_leaves_room_out(plan):
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    experts, tensors, _ = drawn(9, 2, 3, 24, 16, dtype, torch.tensor([[0, 9], [2, 0], [-1, 9]] * 3))
    tensors[0][4, 3] = float("nan")
    out = moe_experts(tensors[0], experts, *tensors[1:], plan=plan, most=9)
    assert out.isnan().any(1).tolist() == [token == 4 for token in range(9)]
    assert not out[[2, 5, 8]].any()
    assert moe_experts(tensors[0], experts, *tensors[1:], plan=plan, most=0).isfinite().all()


def test_gate_and_up_are_freed_before_their_weights_gradient_is_made(monkeypatch):
    experts, tensors, grad = drawn(20, 2, 3, 24, 16, torch.float32)
    alive = []

    def forward(*arguments, **keywords):
        act, kept = gated_product(*arguments, **keywords)
        weakref.finalize(kept.untyped_storage(), alive.clear)
        alive.append("kept")
        return act, kept

    def weights(*arguments, **keywords):
        seen.append(list(alive))
        return weights_product(*arguments, **keywords)

    seen, gated_product, weights_product = [], module.gated_product, module.weights_product
    monkeypatch.setattr(module, "gated_product", forward)
    monkeypatch.setattr(module, "weights_product", weights)
    leaves = [t.requires_grad_() for t in tensors]
    torch.autograd.grad(moe_experts(leaves[0], experts, *leaves[1:]), leaves, grad)
    assert seen == [["kept"], []]


def test_rows_are_laid_out_only_where_experts_have_many_and_the_products_take_them():
    for pairs, experts in ((8192, 8), (32768, 128), (128 * 128, 128)):
        assert launch_shapes(pairs, experts, 2, library=True) == LAID_OUT
    for shapes in (
        launch_shapes(8192, 8, 2, library=False),
        launch_shapes(128, 8, 2, library=True),
        launch_shapes(32768, 128, 2, library=False),
        launch_shapes(128 * 128 - 1, 128, 2, library=True),
    ):
        assert {tile.by for tile in shapes} == {"pointers"}


def test_a_layer_asks_for_its_rows_and_its_sizes(monkeypatch):
    monkeypatch.setattr(plans, "library_takes", lambda x, gate_up, down: x.dtype == torch.bfloat16)

    def found(pairs, inner, width, dtype=torch.bfloat16):
        weights = [
            torch.empty(shape, dtype=dtype, device="meta") for shape in ((8, 2 * inner, width), (8, width, inner))
        ]
        return choose(pairs, torch.empty(1, width, dtype=dtype, device="meta"), *weights)

    assert found(1024, 14336, 4096) == found(1024, 768, 2048) == LAID_OUT
    for shapes in (found(1023, 14336, 4096), found(1024, 14336, 4096, torch.float16)):
        assert {tile.by for tile in shapes} == {"pointers"}


def test_no_products_but_the_first_take_what_is_not_on_a_gpu():
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((4, 16), (2, 32, 16), (2, 16, 16))]
    assert not library_takes(*tensors)
    assert {tile.by for tile in choose(1024, *tensors)} == {"pointers"}


def test_combine_adds_choices_in_float32():
    rows = torch.tensor([[1.0], [2048.0], [1.0], [-2048.0]], dtype=torch.float16, device=DEVICE)
    slots = torch.tensor([1, 0, 2, 3], dtype=torch.int32, device=DEVICE)
    assert combine(rows, slots, None, 1, 4).item() == 2.0  # in float16 2048 + 1 is 2048


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_tile_fits_a_multiprocessor_and_all_have_the_rows_of_the_order(itemsize):
    for pairs in (1, 16, 128, 512, 4096, 8192, 131072):
        for experts in (1, 8, 128):
            shapes = launch_shapes(pairs, experts, itemsize)
            assert len({tile.rows for tile in shapes[:4]}) == 1
            for name, tile in shapes._asdict().items():
                operands = tile.rows + tile.columns * (2 if name == "gated" else 1)
                buffers = (tile.stages + 1) // 2 if name == "weights" else tile.stages  # every other for the order
                assert operands * tile.block * itemsize * buffers <= SHARED
                assert not tile.turned or tile.rows <= 64


def test_wrong_arguments_are_named():
    experts, (x, router, gate_up, down), _ = drawn(4, 2, 3, 16, 8, torch.float32)
    right = {"x_TD": x, "experts_TK": experts, "router_TK": router, "gate_up_EHD": gate_up, "down_EDF": down}
    wrong = [
        ("x", {"x_TD": x.double()}),
        ("x", {"x_TD": x.T.contiguous().T}),
        ("experts", {"experts_TK": experts[:3]}),
        ("experts", {"experts_TK": experts.float()}),
        ("router", {"router_TK": router[:, :1]}),
        ("router", {"router_TK": router.half()}),
        ("gate_up", {"gate_up_EHD": gate_up[:, :-1]}),
        ("gate_up", {"gate_up_EHD": gate_up[..., :8].contiguous()}),
        ("gate_up", {"gate_up_EHD": gate_up.half()}),
        ("down", {"down_EDF": down.transpose(1, 2)}),
        ("down", {"down_EDF": down[:2]}),
    ]
    moe_experts(**right)
    for name, change in wrong:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            moe_experts(**(right | change))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 40, 700], ids="{} tokens".format)
@pytest.mark.parametrize(("width", "inner"), [(512, 256), (264, 136), (250, 131)])
def test_the_tiles_of_a_gpu_are_right_where_they_divide_and_where_not(tokens, width, inner, assert_near):
    check(*drawn(tokens, 2, 5, width, inner, torch.bfloat16), assert_near, units=4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says of it that it does not see everything
@pytest.mark.parametrize("plan", [None, LAID_OUT], ids=["few rows", "many rows"])
def test_the_host_waits_for_nothing_and_a_graph_replays_other_routings(plan):
    if plan is not None and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    experts, tensors, grad = drawn(40, 2, 5, 512, 256, torch.bfloat16)
    others = experts.flip(0).contiguous()

    def both():
        leaves = [t.detach().requires_grad_() for t in tensors]
        out = moe_experts(leaves[0], experts, *leaves[1:], plan=plan)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    both()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        both()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        replayed = both()
    experts.copy_(others)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(replayed, both(), strict=True))


def hopper_jobs(pairs, count, whole=True):
    """Names and jobs of the products for that many pairs and experts, backward where there are many."""
    jobs, names = [], []
    gated, down, gate, back, weights = launch_shapes(pairs, count, 2, whole)
    back_too = pairs > 1000
    many = [("gate_backward_kernel", gate, {"EVEN": whole, "ALL": whole})] if back_too else []
    many += [("rows_kernel", back, {"ACROSS": True, "TURNED": False, "EVEN": whole, "ALL": whole})] if many else []
    many += [("weights_kernel", weights, {"GATHER_A": gather}) for gather in (True, False) if many]
    for name, tile, constants in [
        ("gated_kernel", gated, {"KEEP": back_too, "TURNED": gated.turned, "EVEN": whole}),
        ("rows_kernel", down, {"ACROSS": False, "TURNED": down.turned, "EVEN": whole, "ALL": whole}),
        *many,
    ]:
        kernel = getattr(__import__("kernels.moe_products", fromlist=[name]), name)
        others = {"order_ptr": "*i32", "tiles_ptr": "*i32", "ends_ptr": "*i32", "parts_ptr": "*fp32"}
        arguments = {a: others.get(a, "*bf16" if a.endswith("_ptr") else "i32") for a in kernel.arg_names}
        arguments |= {"ROWS": tile.rows, "COLUMNS": tile.columns, "BLOCK": tile.block, "GROUP": tile.group}
        arguments |= {"EXACT": False, "WIDE": False, **constants}
        names.append(f"{name} {constants}")
        odd = [] if whole else [name for name, kind in arguments.items() if kind == "i32"]
        jobs.append({"kernel": f"kernels.moe_products:{name}", "arguments": arguments, "ptx": True, "odd": odd})
        jobs[-1] |= {"warps": tile.warps, "options": {"num_stages": tile.stages}}
    return names, jobs


@pytest.mark.slow
def test_on_hopper_operands_are_copied_whole_and_loops_do_not_spill(compile_for_hopper):
    names, jobs = hopper_jobs(32768, 8)
    few_names, few = hopper_jobs(512, 128)
    for name, report in zip(names + few_names, compile_for_hopper(jobs + few), strict=True):
        # Three values of the gate's backward, whose sums and addresses fill the registers, wait outside its loop.
        assert report["stack"] <= (16 if name.startswith("gate_backward") else 0), name
        assert report["shared"] <= SHARED, name
        assert "wgmma.mma_async" in report["ptx"], name
        assert "cp.async.cg.shared.global" in report["ptx"], name


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [1500, 32768])
def test_on_hopper_odd_rows_that_go_through_registers_have_room_there(pairs, compile_for_hopper):
    names, jobs = hopper_jobs(pairs, 64 if pairs < 32768 else 8, whole=False)
    for name, report in zip(names, compile_for_hopper(jobs), strict=True):
        assert report["stack"] == 0, name
