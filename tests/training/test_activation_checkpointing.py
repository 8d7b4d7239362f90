"""Activation checkpointing: every way gives the gradients of the plain one to the bit, keeps the bytes that the count
says, and computes again what the count says."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from harness.check import judge
from harness.pair import Context, Inputs
from harness.workload import parse_workload
from impls.model.decoder import Decoder
from impls.parallel import shared
from impls.training import checkpointed_trunk as trunks
from impls.training.activation_bytes import LEAN, WAYS, counts_of
from impls.training.activation_checkpointing import PAIR, Lean, Offloaded, Step, inputs
from impls.training.lean_passes import Fused, Plain
from impls.training.live_bytes import LiveBytes
from kernels._rows import multiprocessors
from suites.training.activation_checkpointing import WORKLOADS

CPU = torch.device("cpu")
WITH_KERNELS = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there interpreted
OURS = ("optimized", "gate_up_again", "selective_eager", "full", "every_other")
EVEN = {"layers": 4, "width": 64, "ffn": 176, "heads": 4, "kv_heads": 2, "vocab": 257} | {
    "batch": 2,
    "seq": 64,
    "chunk": 32,
}
SIZES = {
    "even": EVEN,
    "odd": {**EVEN, "layers": 3, "width": 42, "ffn": 101, "heads": 3, "kv_heads": 1} | {"batch": 3, "seq": 13},
    "one": {**EVEN, "layers": 1, "vocab": 31, "chunk": 1000},
    "few": {**EVEN, "layers": 2, "vocab": 31, "seq": 20, "chunk": 7, "kv_heads": 4},
    "square": {**EVEN, "ffn": 64, "kv_heads": 4, "vocab": 31},
}


def workload(dims, dtype="float32"):
    return parse_workload(PAIR.name, {"name": "test", "tier": "smoke", "dtype": dtype, **dims}, "test")


def case_of(build, dims, dtype="float32", seed=3, device=CPU):
    chosen = workload(dims, dtype)
    ctx = Context(device, getattr(torch, dtype), seed)
    case = build(chosen, ctx)
    case.load(Inputs(inputs(chosen, ctx), seed))
    return case


def step_of(name, dims, dtype="float32"):
    build = Offloaded if name == "offload" else PAIR.variant(name).fn
    case = case_of(build, dims, dtype)
    case.poison()
    case.run()
    return case, {key: value.clone() for key, value in case.result().items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_the_plain_ones_to_the_bit_and_bytes_are_as_counted(size, dtype):
    _, plain = step_of("baseline", SIZES[size], dtype)
    assert all(value.isfinite().all() and value.abs().max() > 0 for value in plain.values())
    for name in ("baseline", *OURS):
        case, found = step_of(name, SIZES[size], dtype)
        assert list(found) == list(plain)
        assert [key for key in plain if not torch.equal(found[key], plain[key])] == []
        counters = case.counters()
        assert counters["saved_bytes"] == counters["saved_formula"]
        # Beside what is counted there is the loss of each chunk.
        assert 0 <= counters["peak_bytes"] - counters["peak_formula"] <= 256
        again = {key: value.clone() for key, value in case.result().items()}
        assert [key for key in plain if not torch.equal(again[key], found[key])] == []


def narrow_decoder(config, ctx):
    """The decoder in bfloat16 as it is made: a tensor without memory cannot be cast in place."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Decoder(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.frequencies = model.frequencies.float()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("raw", [raw for raw in WORKLOADS if raw["tier"] != "smoke"], ids=lambda raw: raw["name"])
def test_the_count_holds_at_the_sizes_that_are_measured(raw, monkeypatch):
    """Every operation of a step on tensors without memory: the sizes of a GPU's workloads, by the CPU's operations."""
    monkeypatch.setattr(shared, "empty_model", narrow_decoder)
    chosen = parse_workload(PAIR.name, raw, "test")
    for name in ("baseline", *OURS):
        with FakeTensorMode(allow_non_fake_inputs=True):
            case = PAIR.variant(name).fn(chosen, Context(CPU, torch.bfloat16, 3))
            case.tokens = torch.zeros(chosen.batch, chosen.seq + 1, dtype=torch.long)
            counters = case.counters()
        assert counters["saved_bytes"] == counters["saved_formula"] > 1e8
        assert 0 <= counters["peak_bytes"] - counters["peak_formula"] <= 256


class Unlaunched:
    """In place of a kernel: bytes do not hang on values."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: None


@pytest.fixture
def unlaunched(monkeypatch):
    for module, kernels in {
        "add_rms_norm": ("_forward_kernel", "_backward_kernel"),
        "_tiles": ("_sum_rows_kernel",),
        "swiglu": ("_forward_kernel",),
        "rope": ("_rope_kernel",),
        "recompute": ("_normalize_kernel", "_gate_kernel"),
    }.items():
        for kernel in kernels:
            monkeypatch.setattr(f"kernels.{module}.{kernel}", Unlaunched())
    monkeypatch.setattr("kernels._rows.INTERPRETED", True)  # tensors on the CPU will do, beside a GPU too


def fused(again):
    return lambda w, ctx: Lean(w, ctx, again, Fused())


def check_bytes_with_kernels(case):
    """Beside what is counted there is each program's part of a norm's weight gradient, and their sum."""
    counters = case.counters()
    assert counters["saved_bytes"] == counters["saved_formula"]
    programs = multiprocessors(CPU)
    parts = case.workload.width * (4 * programs + case.counts().size)
    assert 0 <= counters["peak_bytes"] - counters["peak_formula"] <= max(256, parts + 4)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_with_kernels_bytes_are_as_counted(size, dtype, again, unlaunched):
    check_bytes_with_kernels(case_of(fused(again), SIZES[size], dtype))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("raw", [raw for raw in WORKLOADS if raw["tier"] != "smoke"], ids=lambda raw: raw["name"])
def test_with_kernels_the_count_holds_at_the_sizes_that_are_measured(raw, again, unlaunched, monkeypatch):
    monkeypatch.setattr(shared, "empty_model", narrow_decoder)
    chosen = parse_workload(PAIR.name, raw, "test")
    with FakeTensorMode(allow_non_fake_inputs=True):
        case = fused(again)(chosen, Context(CPU, torch.bfloat16, 3))
        case.tokens = torch.zeros(chosen.batch, chosen.seq + 1, dtype=torch.long)
        check_bytes_with_kernels(case)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value):RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("again", [False, True])
def test_with_kernels_every_gradient_is_right(again):
    dims = {**SIZES["odd"], "layers": 2}
    plain, oracle, case = (
        case_of(build, dims, device=WITH_KERNELS) for build in (PAIR.variant("baseline").fn, PAIR.oracle, fused(again))
    )
    plain.run()
    oracle.run()
    case.poison()
    case.run()
    judged = judge(PAIR.tolerance, "float32", oracle.result(), case.result(), plain.result())
    assert judged.passed, judged.reason


def test_with_kernels_gradients_are_turned_back_whatever_their_strides():
    ctx = Context(WITH_KERNELS, torch.float32, 3)
    grads = [ctx.randn(2, 8, 6, heads, salt=heads).transpose(-1, -2) for heads in (4, 2)]
    assert all(grad.stride(-1) != 1 for grad in grads)
    angles = ctx.randn(1, 8, 3)
    angles = torch.cat((angles, angles), dim=-1)
    found = Fused().rotate_back(*grads, *Fused().angles(angles.cos(), angles.sin()))
    for got, want in zip(found, Plain().rotate_back(*grads, angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(got, want)


def test_with_kernels_a_second_backward_is_refused(unlaunched):
    """The first wrote gradients where gate and up were."""
    case = case_of(fused(False), {**EVEN, "layers": 1})
    hidden = case.forward()
    hidden.backward(torch.ones_like(hidden), retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.backward(torch.ones_like(hidden))


def test_the_step_is_that_of_the_plain_decoder():
    case, found = step_of("optimized", SIZES["odd"], "float64")
    model = case.model
    model.zero_grad()
    logits = model(case.tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), case.tokens[:, 1:].flatten())
    loss.backward()
    torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-12, atol=0)
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[f"grad.{name}"], param.grad, rtol=1e-9, atol=1e-12)


def test_memory_falls_in_the_order_that_the_claim_says():
    kept = {name: step_of(name, EVEN, "bfloat16")[0].counters()["saved_bytes"] for name in ("baseline", *OURS)}
    assert kept["full"] < kept["gate_up_again"] < kept["optimized"] <= kept["selective_eager"] < kept["baseline"]
    assert kept["full"] < kept["every_other"] < kept["baseline"]
    for raw in WORKLOADS:
        chosen = parse_workload(PAIR.name, raw, "test")
        counts = counts_of(chosen, fused=True)
        assert max(counts.peak(name) for name in OURS) < counts.peak("baseline")
        if raw["tier"] != "smoke":
            assert counts.peak("gate_up_again") < counts.peak("optimized") < counts.peak("every_other")
        assert min(counts.time_factor(name) for name in WAYS[1:] if name not in LEAN) > 1
        assert counts.time_factor("optimized") < counts.time_factor("gate_up_again")
        assert PAIR.predict(chosen) > 1, "fused, the optimized way moves less than the eager baseline"
    assert PAIR.claim.memory == "lower"
    assert PAIR.claim.latency == ""


def test_what_the_docstring_says_of_a_layer_of_llama_3_8b_is_what_is_counted():
    raw = next(raw for raw in WORKLOADS if raw["name"] == "8b_8k")
    counts = counts_of(parse_workload(PAIR.name, raw, "test"), fused=True)
    sizes = [counts.layer_of(name) / 1024 for name in ("baseline", "selective_eager", "gate_up_again", "full")]
    assert [round(size) for size in sizes] == [196, 92, 36, 8]
    products = 2 * (counts.layer_weights - counts.width * counts.ffn)
    assert round(1 + products / (6 * counts.layer_weights), 2) == 1.24
    d, q, g, f, h = counts.width, counts.queries, counts.keys, counts.ffn, counts.heads
    assert counts.layer == 16 * d + 4 * q + 4 * g + 8 * f + 4 * h + 8
    assert counts.layer_of("selective_eager") == 4 * d + 4 * q + 4 * g + 4 * f + 4 * h
    assert counts.layer_of("optimized") == counts.layer_of("selective_eager") + 8
    assert counts.layer_of("gate_up_again") == 4 * d + 4 * q + 4 * g + 4 * h + 8
    assert counts.lean_passes == 40 * d + 8 * (q + g) + 18 * f


@pytest.mark.parametrize("name", ["baseline", *OURS])
def test_products_and_attention_are_computed_again_as_often_as_counted(name):
    case, _ = step_of("baseline", EVEN)
    other, _ = step_of(name, EVEN)
    found = []
    for each in (case, other):
        with FlopCounterMode(display=False) as counter:
            each.run()
        by_op = counter.get_flop_counts()["Global"]
        found.append(sum(value for op, value in by_op.items() if "mm" in str(op)))
    counts = counts_of(case.workload)
    again = {"full": counts.layers, "every_other": (counts.layers + 1) // 2}.get(name, 0)
    products = counts.recomputed_flops(name) - again * counts.tokens * 2 * counts.seq * counts.queries
    assert found[1] - found[0] == products
    assert found[0] == counts.flops - counts.layers * counts.tokens * 6 * counts.seq * counts.queries


def drifting(number, layer, x, cos, sin, attend):
    """A layer that is not the same when it is computed again."""
    factors = iter((1.0, 1.01))
    return checkpoint(lambda y: layer(y * next(factors), None, cos, sin, attend), x, use_reentrant=False)


def test_a_layer_that_is_computed_again_differently_is_found_though_its_loss_is_right():
    _, plain = step_of("baseline", EVEN)
    oracle = case_of(PAIR.oracle, EVEN)
    oracle.run()
    right = judge(PAIR.tolerance, "float32", oracle.result(), step_of("optimized", EVEN)[1], plain)
    assert right.passed, right.reason
    case = case_of(lambda w, ctx: Step(w, ctx, "full", drifting), EVEN)
    case.run()
    found = case.result()
    assert torch.equal(found["loss"], plain["loss"])
    wrong = judge(PAIR.tolerance, "float32", oracle.result(), found, plain)
    assert not wrong.passed
    assert "grad." in wrong.reason


class Dropping(nn.Module):
    """A feed-forward with dropout after it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.3)


def forgetful(number, layer, x, cos, sin, attend):
    return checkpoint(layer, x, None, cos, sin, attend, use_reentrant=False, preserve_rng_state=False)


def test_random_numbers_are_drawn_the_same_again():
    def gradients(run_layer):
        case = case_of(lambda w, ctx: Step(w, ctx, "baseline", run_layer), EVEN)
        for layer in case.model.layers:
            layer.mlp = Dropping(layer.mlp)
        torch.manual_seed(5)
        case.run()
        return [param.grad.clone() for param in case.model.parameters()], torch.rand(1)

    plain, after = gradients(trunks.keep)
    for run_layer in (trunks.recompute, trunks.selective, trunks.every_other):
        found, then = gradients(run_layer)
        assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        assert torch.equal(after, then), "the state after the step is another"
    forgot, _ = gradients(forgetful)
    assert not all(torch.equal(a, b) for a, b in zip(forgot, plain, strict=True)), "dropout makes no difference here"


class Far(Step):
    """Offloading to memory that is not counted as the device's."""

    def keeping(self):
        def pack(x):
            return x.dtype, np.array(x.detach().view(torch.int16 if x.dtype == torch.bfloat16 else x.dtype).numpy())

        def unpack(packed):
            back = torch.from_numpy(packed[1]).clone()
            return back.view(torch.bfloat16) if packed[0] == torch.bfloat16 else back

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloading_keeps_the_hidden_states_only_and_sends_what_is_counted(dtype):
    _, plain = step_of("baseline", EVEN, dtype)
    case, found = step_of("offload", EVEN, dtype)
    assert [key for key in plain if not torch.equal(found[key], plain[key])] == []
    counters = case.counters()
    assert counters["host_bytes"] == counters["host_formula"]
    far = case_of(lambda w, ctx: Far(w, ctx, "offload", trunks.keep), {**EVEN, "vocab": 31}, dtype)
    far.run()
    counters = far.counters()
    assert counters["saved_bytes"] == counters["saved_formula"]
    assert counters["peak_bytes"] == pytest.approx(counters["peak_formula"], rel=0.03)


def test_offloading_says_why_it_does_not_run_here(tmp_path):
    from harness import discover
    from harness.job import EventReader, Events, MeasureJob
    from harness.measure import Measurement
    from harness.ranked import Agreement

    technique = discover.find(PAIR.name)
    smoke = next(w for w in discover.workloads_of(technique) if w.tier == "smoke")
    out = Path(tmp_path) / "events.jsonl"
    events = Events(out, 0)
    job = MeasureJob(PAIR.name, (smoke,), ("baseline", "offload"), "cpu", str(out), timing=False)
    Measurement(PAIR, smoke, job, Agreement(0, 1), events).run()
    events.close()
    ended = {e["variant"]: e for e in EventReader(out).new() if e["event"] == "result"}
    assert ended["baseline"]["status"] == "passed"
    assert ended["offload"]["status"] == "skipped"
    assert "GPU" in ended["offload"]["reason"] or "CUDA" in ended["offload"]["reason"]
    json.dumps(ended)


def test_live_bytes_counts_a_storage_once_until_its_last_view_is_gone():
    with LiveBytes() as live:
        whole = torch.empty(10)
        half = whole[:5]
        assert live.now == 40
        del whole
        assert live.now == 40
        half += 1
        assert live.now == 40
        del half
        assert live.now == 0
    assert live.peak == 40


def kept_by_a_layer(case):
    """Bytes that autograd keeps of the middle layers, as a compiled function hands them over: a count operation by
    operation would make torch run the layers as if they were not compiled."""
    weights = {param.untyped_storage()._cdata for param in case.model.parameters()}
    sizes: dict[int, int] = {}
    alive = []

    def pack(x):
        if x.untyped_storage()._cdata not in weights:
            sizes[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            alive.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.forward()
    return sum(sizes.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's
def test_the_compiled_variants_are_right_keep_what_they_should_and_one_layers_code_serves_all():
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler for torch.compile")
    names = ("torch_compile", "selective_compile", "torch_compile_half")
    dims = {**EVEN, "seq": 20}
    wanted = step_of("baseline", dims)[1]
    cases = {name: case_of(PAIR.variant(name).fn, dims) for name in names}  # side by side, as they are measured
    for case in cases.values():
        torch._dynamo.utils.counters.clear()
        case.run()
        case.run()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]
        found = case.result()
        assert list(wanted) == list(found)
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)
        assert case.counters() == {}, "a CPU cannot tell"
    tokens, counts = 2 * 20, counts_of(cases["torch_compile"].workload)
    kept = {name: kept_by_a_layer(case) for name, case in cases.items()}
    plain = kept_by_a_layer(case_of(PAIR.variant("baseline").fn, dims))
    assert kept["torch_compile_half"] < kept["selective_compile"] < kept["torch_compile"] < plain
    rest = plain - tokens * counts.layers * counts.layer_of("baseline")
    assert kept["selective_compile"] - rest == tokens * counts.layers * counts.layer_of("selective_eager")
    assert [PAIR.variant(name).peer for name in names] == ["torch", "", "torch"]
