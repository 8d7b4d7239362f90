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
from impls.training.activation_bytes import WAYS, counts_of
from impls.training.activation_checkpointing import PAIR, Offloaded, Step, inputs
from impls.training.live_bytes import LiveBytes
from suites.training.activation_checkpointing import WORKLOADS

CPU = torch.device("cpu")
OURS = ("optimized", "full", "every_other")
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


def case_of(build, dims, dtype="float32", seed=3):
    chosen = workload(dims, dtype)
    ctx = Context(CPU, getattr(torch, dtype), seed)
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
    assert kept["full"] < kept["optimized"] < kept["baseline"]
    assert kept["full"] < kept["every_other"] < kept["baseline"]
    for raw in WORKLOADS:
        counts = counts_of(parse_workload(PAIR.name, raw, "test"))
        assert max(counts.peak(name) for name in OURS) < counts.peak("baseline")
        assert min(counts.time_factor(name) for name in WAYS[1:]) > 1
    assert PAIR.claim.memory == "lower"
    assert PAIR.claim.latency == "higher"


def test_what_the_docstring_says_of_a_layer_of_llama_3_8b_is_what_is_counted():
    raw = next(raw for raw in WORKLOADS if raw["name"] == "8b_8k")
    counts = counts_of(parse_workload(PAIR.name, raw, "test"))
    sizes = [counts.layer_of(name) / 1024 for name in ("baseline", "optimized", "full")]
    assert [round(size) for size in sizes] == [196, 92, 8]
    products = 2 * (counts.layer_weights - counts.width * counts.ffn)
    assert round(1 + products / (6 * counts.layer_weights), 2) == 1.24
    d, q, g, f, h = counts.width, counts.queries, counts.keys, counts.ffn, counts.heads
    assert counts.layer == 16 * d + 4 * q + 4 * g + 8 * f + 4 * h + 8
    assert counts.layer_of("optimized") == 4 * d + 4 * q + 4 * g + 4 * f + 4 * h


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's
def test_the_compiled_peer_is_right_and_one_layers_code_serves_all():
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler for torch.compile")
    dims = {**EVEN, "seq": 20}
    plain, peer = (case_of(PAIR.variant(name).fn, dims) for name in ("baseline", "torch_compile"))
    torch._dynamo.utils.counters.clear()
    for case in (plain, peer):
        case.run()
        case.run()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    wanted, found = plain.result(), peer.result()
    assert list(wanted) == list(found)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert PAIR.variant("torch_compile").peer == "torch"
