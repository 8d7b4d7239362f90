"""weight_only_quant: the quantizer, what a record says of its error, the predictions, what peers can take."""

import shutil

import pytest
import torch

from harness import discover
from harness.opcase import op_builder, op_oracle
from harness.pair import Context, Inputs
from harness.workload import parse_workload
from impls.precision import weight_only_quant as module
from kernels import weight_only_tiles

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def workload(**dims):
    raw = {"name": "here", "tier": "full", "dtype": "float32", "tokens": 3, "outputs": 40, "inputs": 256, "bits": 4}
    return parse_workload("weight_only_quant", {**raw, "group": 128, **dims}, "here")


def context(asked, seed=3):
    return Context(DEVICE, getattr(torch, asked.dtype), seed=seed)


def named(name):
    return next(w for w in discover.workloads_of(discover.find("weight_only_quant")) if w.name == name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [None, 64, 128])
@pytest.mark.parametrize("bits", [8, 4])
def test_weights_go_to_the_nearest_number_and_one_end_is_taken(bits, group, dtype):
    weight = (torch.randn(9, 300, generator=torch.Generator().manual_seed(0)) / 10).to(dtype)
    q, scales = module.quantize(weight, bits, group)
    assert scales.shape == (1 if group is None else -(-300 // group), 9)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    for piece in q.split(group or 300, dim=1):
        assert bool(((piece.min(1).values == low) | (piece.max(1).values == high)).all())
    step = scales.double().T.repeat_interleave(group or 300, dim=1)[:, :300]
    inside = (weight.double() / step).clamp(low, high)
    assert float((inside - q.double()).abs().max()) <= 0.5 + 1e-4


@pytest.mark.parametrize("bits", [8, 4])
def test_the_better_end_beats_the_upper_one_alone(bits):
    weight = torch.randn(50, 256, generator=torch.Generator().manual_seed(0))
    high = 2 ** (bits - 1) - 1
    step = weight.view(50, 2, 128).abs().amax(2, keepdim=True) / high
    upper = ((weight.view(50, 2, 128) / step).round() * step).view(50, 256)
    mine = module.widen(*module.quantize(weight, bits, 128), 128)
    assert float((mine - weight).norm()) < 0.99 * float((upper - weight).norm())


def test_hostile_weights_have_a_form():
    weight = torch.zeros(4, 256)
    weight[1] = 0.25  # all equal: all take the grid's end
    weight[2, 200] = 1e30
    weight[3] = -1e-30
    q, scales = module.quantize(weight, 4, 128)
    assert torch.equal(module.widen(q, scales, 128)[:2], weight[:2])
    assert not q[0].any()
    assert q[1].unique().tolist() in ([7], [-8])
    assert q[3].unique().tolist() in ([7], [-8])
    torch.testing.assert_close(module.widen(q, scales, 128), weight)
    fine, scales = module.quantize(weight, 8, None)
    torch.testing.assert_close(module.widen(fine, scales, None), weight)


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128), (4, 0)])
def test_the_record_has_the_error_of_quantization_and_the_bytes_of_both_forms(bits, group):
    asked = workload(bits=bits, group=group, outputs=1100, inputs=384)
    case = op_builder(module.PAIR, module.PAIR.variant("optimized"))(asked, context(asked))
    found = case.choice()
    drawn = module.inputs(asked, context(asked))
    x, weight = drawn["x"].double(), context(asked).randn(1100, 384, scale=384**-0.5, salt=1).double()
    want = (x @ (drawn["weight"].double() - weight).T).norm() / (x @ weight.T).norm()
    assert found["quantization_error"] == pytest.approx(float(want), rel=1e-4)
    # A step of absmax / ends is off by step / √12 on average; absmax of n normal numbers lies near √(2 ln n).
    step = (2 * torch.log(torch.tensor(float(group or 384)))).sqrt() / (2 ** (bits - 1) - 1)
    assert 0.5 < found["quantization_error"] / float(step / 12**0.5) < 1.5
    assert found["plain_weight_bytes"] == 4 * 1100 * 384
    packed, scales = drawn["packed"], drawn["scales"]
    assert found["weight_bytes"] == packed.numel() * 2 + scales.numel() * 4
    assert {"rows", "tokens", "warps", "stages", "splits"} <= set(found)


@pytest.mark.parametrize(("bits", "group"), [(8, 0), (4, 128)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_tokens_of_16_bits_take_tiles_and_every_form_widens_to_the_same_weights(bits, group, dtype):
    last = weight_only_tiles.FEW_TOKENS
    for tokens in (1, last, last + 1):
        asked = workload(tokens=tokens, bits=bits, group=group, outputs=40, inputs=300, dtype=dtype)
        drawn = module.inputs(asked, context(asked))
        tiles = dtype == "bfloat16" and tokens <= last
        assert drawn["packed"].ndim == (3 if tiles else 2)
        assert module.dequantized(**drawn).equal(module.resident(**drawn))
        found = op_builder(module.PAIR, module.PAIR.variant("optimized"))(asked, context(asked)).choice()
        assert ("ahead" in found) == tiles
        assert all(isinstance(number, (int, float)) for number in found.values())


def test_the_oracle_is_held_to_the_stored_weights_not_to_those_before():
    asked = workload()
    inputs = Inputs(module.inputs(asked, context(asked)), 3)
    case = op_oracle(module.PAIR)(asked, context(asked))
    case.load(inputs)
    case.run()
    before = context(asked).randn(40, 256, scale=256**-0.5, salt=1).double()
    stored = inputs["weight"].double()
    out = case.result()["out"]
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, inputs["x"].double() @ stored.T, rtol=1e-5, atol=1e-6)
    assert float((out - inputs["x"].double() @ before.T).norm() / out.norm()) > 0.03


#: As the docstring says them: bytes while memory binds, nothing where arithmetic binds both.
PREDICTED = {
    "up_b1_int8": 2.0,
    "up_b1_int4": 3.87,
    "up_b16_int8": 1.99,
    "up_b16_int4": 3.82,
    "up_b64_int8": 1.96,
    "up_b64_int4": 2.53,
    "down_b1_int4": 3.87,
    "up_b256_int8": 1.0,
    "up_b256_int4": 1.0,
}


@pytest.mark.parametrize("name", PREDICTED)
def test_predictions_are_those_of_the_docstring(name):
    assert module.predict(named(name)) == pytest.approx(PREDICTED[name], rel=5e-3)


def test_arithmetic_binds_from_where_the_docstring_says():
    def bound(**dims):
        asked = workload(dtype="bfloat16", outputs=14336, inputs=4096, **dims)
        done = module.work(asked)
        return done.flops / module.PRODUCTS > done.bytes / module.COPY

    for bits, group, tokens in ((4, 128, 44), (8, 0, 84)):
        assert bound(bits=bits, group=group, tokens=tokens)
        assert not bound(bits=bits, group=group, tokens=tokens - 1)
    assert module.predict(workload(dtype="bfloat16", outputs=14336, inputs=4096, tokens=168)) == 1.0
    assert module.predict(workload(dtype="bfloat16", outputs=14336, inputs=4096, tokens=167)) > 1.0


def test_large_workloads_are_the_mlp_layers_of_the_8b_model():
    found = [w for w in discover.workloads_of(discover.find("weight_only_quant")) if w.tier != "smoke"]
    assert {w.tokens for w in found} == {1, 8, 16, 64, 256}
    for w in found:
        assert {w.outputs, w.inputs} == {4096, 14336}
        assert (w.bits, w.group) in ((8, 0), (4, 128))


def test_peers_say_what_they_do_not_take(monkeypatch):
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: "pack" in name)
    bf16 = {"dtype": "bfloat16"}
    assert module.int4_unsupported(workload(**bf16)) is None
    assert module.int8_unsupported(workload(**bf16, bits=8, group=0)) is None
    assert "int8" in module.int8_unsupported(workload(**bf16))
    assert "one scale a channel" in module.int8_unsupported(workload(**bf16, bits=8, group=128))
    assert "bfloat16" in module.int4_unsupported(workload())
    assert "groups" in module.int4_unsupported(workload(**bf16, group=0))
    assert "multiples" in module.int4_unsupported(workload(**bf16, inputs=200))
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: False)
    assert "_convert_weight_to_int4pack" in module.int4_unsupported(workload(**bf16))
    assert "_weight_int8pack_mm" in module.int8_unsupported(workload(**bf16, bits=8, group=0))


def test_torch_s_int8_product_is_right_on_a_cpu_where_it_has_one():
    asked = workload(dtype="bfloat16", bits=8, group=0, outputs=64)
    drawn = module.inputs(asked, Context(torch.device("cpu"), torch.bfloat16, seed=3))
    q, _ = module.quantize(module._weight(asked, Context(torch.device("cpu"), torch.bfloat16, seed=3)), 8, None)
    got = module.int8_mm(plain_int8=q, **drawn)
    truth = drawn["x"].double() @ (q.double() * drawn["scales"].double().T).T
    assert got.shape == (3, 64)
    assert float((got.double() - truth).norm() / truth.norm()) < 2.0**-7


def test_the_compilers_best_int8_product_takes_one_token_and_is_right():
    asked = workload(dtype="bfloat16", bits=8, group=0, outputs=64, tokens=1)
    here = Context(torch.device("cpu"), torch.bfloat16, seed=3)
    drawn = module.inputs(asked, here)
    q, _ = module.quantize(module._weight(asked, here), 8, None)
    got = module.int8_sum(plain_int8=q, **drawn)
    plain = module.resident(**drawn)
    assert (got.shape, got.dtype, got.stride()) == (plain.shape, plain.dtype, plain.stride())
    truth = drawn["x"].double() @ (q.double() * drawn["scales"].double().T).T
    assert float((got.double() - truth).norm() / truth.norm()) < 2.0**-8
    assert module.not_one_token(asked) is None
    for other in ({"tokens": 2}, {"bits": 4}, {"group": 128}):
        assert "one token" in module.not_one_token(workload(**{"bits": 8, "group": 0, "tokens": 1, **other}))
    peer = module.PAIR.variant("compiled_int8")
    assert peer.compiled
    assert peer.peer == "torch"


@pytest.mark.slow
def test_the_compiled_peer_is_right():
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler for torch.compile")
    for asked in (workload(), workload(bits=8, group=0)):
        inputs = Inputs(module.inputs(asked, context(asked)), 3)
        case = op_builder(module.PAIR, module.PAIR.variant("torch_compile"))(asked, context(asked))
        truth = op_oracle(module.PAIR)(asked, context(asked))
        for one in (case, truth):
            one.load(inputs)
            one.run()
        torch.testing.assert_close(case.result()["out"].double(), truth.result()["out"], rtol=1e-4, atol=1e-5)
