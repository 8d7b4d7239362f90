"""LayerNorm + dropout + add: float64 with the mask known, and the mask against Philox written out in Python."""

import pytest
import torch

import kernels.layer_norm_dropout_add as module
from kernels.dropout_mask import ROUNDS, drop_threshold, dropout_mask, keep_scale
from kernels.layer_norm_dropout_add import (
    MAX_COLUMNS,
    Launch,
    in_pairs,
    launch_shape,
    layer_norm_dropout_add,
    layer_norm_dropout_add_backward,
    layer_norm_dropout_add_forward,
)

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SEED = 2**40 + 17


def philox(seed, first, second):
    """Philox-4x32 of the counter (first, second, 0, 0): Salmon et al. 2011, section 3.3."""
    words = [first, second, 0, 0]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(ROUNDS):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32) ^ words[1] ^ key[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ words[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return words


def plain(mask, scale):
    def function(x, residual, weight, bias):
        normed = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        return residual + normed * mask.to(x.dtype).reshape(x.shape) * scale

    return function


def check(tensors, grad, p, gradients, assert_near, units=16):
    x = tensors[0]
    mask = dropout_mask(x.numel() // x.shape[-1], x.shape[-1], p, SEED, x.device)
    (out,), got = gradients(lambda *t: layer_norm_dropout_add(*t, p, SEED, EPS), tensors, [grad])
    doubles = [tensor.double() for tensor in tensors]
    (want,), wanted = gradients(plain(mask, keep_scale(p)), doubles, [grad.double()])
    assert_near(out, want, units)
    for actual, expected in zip(got, wanted, strict=True):
        assert_near(actual, expected, units)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(9, 3), (1, 7), (7, 33), (2, 5, 100), (3, 2049)], ids=str)
def test_equals_float64_with_every_gradient(shape, dtype, draw, gradients, assert_near):
    x, residual, grad = (draw(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 4))
    weight, bias = draw(shape[-1], dtype=dtype, seed=2), draw(shape[-1], dtype=dtype, seed=3)
    check([x, residual, weight, bias], grad, 0.25, gradients, assert_near)


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_rates_at_the_ends(p, draw, gradients, assert_near):
    tensors = [draw(5, 40), draw(5, 40, seed=1), draw(40, seed=2), draw(40, seed=3)]
    check(tensors, draw(5, 40, seed=4), p, gradients, assert_near)


def test_longest_rows(draw, gradients, assert_near):
    tensors = [draw(2, MAX_COLUMNS), draw(2, MAX_COLUMNS, seed=1), draw(MAX_COLUMNS, seed=2), draw(MAX_COLUMNS, seed=3)]
    check(tensors, draw(2, MAX_COLUMNS, seed=4), 0.1, gradients, assert_near, units=32)


def test_one_column_and_all_equal_rows_come_out_as_bias(draw):
    residual, weight, bias = draw(6, 1), draw(1, seed=1), draw(1, seed=2)
    out, _, _ = layer_norm_dropout_add_forward(draw(6, 1, seed=3), residual, weight, bias, 0.0, SEED)
    assert torch.equal(out, residual + bias)
    residual, weight, bias = draw(6, 64), draw(64, seed=1), draw(64, seed=2)
    out, mean, _ = layer_norm_dropout_add_forward(torch.full_like(residual, 1e4), residual, weight, bias, 0.0, SEED)
    assert torch.equal(mean, torch.full_like(mean, 1e4))
    assert torch.equal(out, residual + bias)


def test_large_offset_does_not_cancel(draw, gradients, assert_near):
    x = (draw(5, 96) + 1e4).double()
    tensors = [x.float(), draw(5, 96, seed=1), draw(96, seed=2), draw(96, seed=3)]
    # The mean is rounded to float32, 1e4 roundings of a row of deviation one; E[x²] - E[x]² would lose everything.
    check(tensors, draw(5, 96, seed=4), 0.25, gradients, assert_near, units=4e4)


@pytest.mark.parametrize("columns", [1000, 1024])
def test_an_outlier_that_comes_first_costs_16_bit_rows_no_more_than_their_rounding(columns, draw, assert_near):
    x, residual, one = draw(4, columns, scale=1e-3), torch.zeros(4, columns), torch.ones(columns)
    x[:, 0], x[1] = 100.0, 3.0
    x, residual, one = (t.half().to(draw(1).device) for t in (x, residual, one))
    out, mean, _ = layer_norm_dropout_add_forward(x, residual, one, 0 * one, 0.0, SEED)
    want = torch.nn.functional.layer_norm(x.double(), (columns,), eps=EPS)
    assert_near(out, want, units=2)
    torch.testing.assert_close(mean, x.double().mean(1).float())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, from the interpreter
def test_16_bit_nan_and_inf_stand_where_the_plain_way_has_them(draw, assert_near):
    x, residual, weight, bias = (draw(5, 33), draw(5, 33, seed=1), draw(33, seed=2), draw(33, seed=3))
    x[1, 4], x[2, 0], residual[3, 5] = float("nan"), float("inf"), float("-inf")
    tensors = [t.bfloat16() for t in (x, residual, weight, bias)]
    out, _, _ = layer_norm_dropout_add_forward(*tensors, 0.5, SEED)
    mask = dropout_mask(5, 33, 0.5, SEED, x.device)
    assert_near(out, plain(mask, 2.0)(*(t.double() for t in tensors)), units=4)


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("columns", [64, 50])
def test_every_shape_of_launch_gives_the_same(rows, columns, draw, monkeypatch):
    x, residual, grad = (draw(rows, columns, seed=seed).bfloat16() for seed in (0, 1, 4))
    weight, bias = draw(columns, seed=2).bfloat16(), draw(columns, seed=3).bfloat16()
    results = []
    for tile_rows, block, chunks in [(1, 64, 1), (2, 64, 1), (4, 128, 1), (4, 64, 2), (2, 128, 4)]:
        launch = Launch(tile_rows, block, 4, 128, chunks)
        monkeypatch.setattr(module, "launch_shape", lambda *_, launch=launch, **__: launch)
        out, mean, rstd = layer_norm_dropout_add_forward(x, residual, weight, bias, 0.3, SEED)
        results.append((out, *layer_norm_dropout_add_backward(grad, x, weight, mean, rstd, 0.3, SEED)))
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])


def test_the_mask_is_philox_eight_draws_a_call(draw):
    device = draw(1).device
    threshold = drop_threshold(0.3)
    mask = dropout_mask(5, 21, 0.3, SEED, device).cpu()
    groups = 3
    for row in range(5):
        for group in range(groups):
            words = philox(SEED, group, row)
            draws = [half for word in words for half in (word & 0xFFFF, word >> 16)]
            # tl.join puts the second of a pair last: halves, then words within a pair, then pairs.
            order = [draws[2 * (2 * pair + word) + half] for half in (0, 1) for word in (0, 1) for pair in (0, 1)]
            want = [value >= threshold for value in order]
            got = mask[row, group * 8 : group * 8 + 8].tolist()
            assert got == want[: len(got)]


def test_the_mask_does_not_depend_on_the_direction_or_the_tile(draw):
    columns = 40
    x, zero = draw(300, columns), torch.zeros(300, columns, device=draw(1).device)
    one, nought = torch.ones(columns, device=x.device), torch.zeros(columns, device=x.device)
    mask = dropout_mask(300, columns, 0.4, SEED, x.device)
    out, mean, rstd = layer_norm_dropout_add_forward(x, zero, nought, one, 0.4, SEED)  # bias alone: keep * scale
    assert torch.equal(out != 0, mask)
    _, _, grad_bias = layer_norm_dropout_add_backward(one.expand(300, columns).clone(), x, one, mean, rstd, 0.4, SEED)
    torch.testing.assert_close(grad_bias, mask.sum(0) * keep_scale(0.4))
    assert not torch.equal(mask, dropout_mask(300, columns, 0.4, SEED + 1, x.device))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_keep_rate_is_p_within_five_deviations_over_rows_columns_and_neighbours(p, draw):
    mask = dropout_mask(256, 512, p, 7, draw(1).device).double()
    keep = 1 - drop_threshold(p) / 65_536
    assert abs(keep - (1 - p)) <= 2.0**-17
    deviation = (keep * (1 - keep)) ** 0.5
    assert abs(mask.mean() - keep) < 5 * deviation / mask.numel() ** 0.5
    assert (mask.mean(0) - keep).abs().max() < 6 * deviation / 256**0.5
    assert (mask.mean(1) - keep).abs().max() < 6 * deviation / 512**0.5
    centred = mask - keep
    for step in (1, 2, 4, 8):  # within a Philox call and across calls
        together = (centred[:, step:] * centred[:, :-step]).mean() / deviation**2
        assert abs(together) < 5 / (256 * (512 - step)) ** 0.5
        together = (centred[step:] * centred[:-step]).mean() / deviation**2  # rows: the counter's other word
        assert abs(together) < 5 / (512 * (256 - step)) ** 0.5


def test_the_draws_of_two_seeds_and_of_a_call_s_eight_places_are_independent(draw):
    device, p = draw(1).device, 0.25
    masks = [dropout_mask(128, 512, p, seed, device).double() - (1 - p) for seed in (SEED, SEED + 1, SEED + 2**32)]
    variance = p * (1 - p)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert abs((masks[one] * masks[other]).mean() / variance) < 5 / masks[0].numel() ** 0.5
    places = masks[0].view(-1, 8)
    together = places.T @ places / len(places) / variance
    assert (together - torch.eye(8, device=device).double()).abs().max() < 5 * 1.2 / len(places) ** 0.5


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, from the interpreter
def test_nan_and_inf_where_the_plain_way_has_them(draw, assert_near):
    x, residual, weight, bias = draw(5, 33), draw(5, 33, seed=1), draw(33, seed=2), draw(33, seed=3)
    x[1, 4], x[2, 0], residual[3, 5] = float("nan"), float("inf"), float("-inf")
    out, _, _ = layer_norm_dropout_add_forward(x, residual, weight, bias, 0.5, SEED)
    mask = dropout_mask(5, 33, 0.5, SEED, x.device)
    assert_near(out, plain(mask, 2.0)(*(t.double() for t in (x, residual, weight, bias))), units=16)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8)])
def test_no_rows(shape, draw):
    x, weight = draw(*shape), draw(8)
    out, mean, rstd = layer_norm_dropout_add_forward(x, x, weight, weight, 0.5, 1)
    assert out.shape == shape
    grads = layer_norm_dropout_add_backward(x, x, weight, mean, rstd, 0.5, 1)
    assert [tuple(grad.shape) for grad in grads] == [shape, (8,), (8,)]


def test_strided_rows_give_what_contiguous_rows_give(draw):
    wide, weight = draw(6, 100), draw(40, seed=1)
    x, residual = wide[:, :40], wide[:, 60:]
    got = layer_norm_dropout_add_forward(x, residual, weight, weight, 0.5, 3)
    want = layer_norm_dropout_add_forward(x.contiguous(), residual.contiguous(), weight, weight, 0.5, 3)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bad_input_is_named(draw):
    good = {"x": draw(4, 8), "residual": draw(4, 8), "weight": draw(8), "bias": draw(8), "p": 0.5, "seed": 1}
    for change, message in [
        ({"x": draw(4, 8).double()}, "x: dtype"),
        ({"residual": draw(4, 7)}, "residual: shape"),
        ({"weight": draw(7)}, "weight: shape"),
        ({"bias": draw(16)[::2]}, "bias: stride"),
        ({"p": 1.5}, "p: 1.5"),
        ({"p": float("nan")}, "p: nan"),
        ({"seed": -1}, "seed: -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            layer_norm_dropout_add_forward(**good | change)
    with pytest.raises(ValueError, match="mean: "):
        layer_norm_dropout_add_backward(draw(4, 8), draw(4, 8), draw(8), draw(3), draw(4), 0.5, 1)


@pytest.mark.slow
def test_compiled_for_hopper_all_programs_are_resident_and_accesses_are_16_bytes(compile_for_hopper):
    jobs, launches, spilled = [], [], []
    for columns, pointer, itemsize in [(4096, "*bf16", 2), (8192, "*bf16", 2), (1024, "*bf16", 2), (1024, "*fp32", 4)]:
        for backward in (False, True):
            launch = launch_shape(columns, itemsize, backward=backward)
            names = ("grad_out_ptr", "grad_x_ptr") if backward else ("residual_ptr", "bias_ptr", "out_ptr")
            arguments = dict.fromkeys(("x_ptr", "weight_ptr", *names), pointer)
            arguments |= {"mean_ptr": "*fp32", "rstd_ptr": "*fp32", "partial_ptr": "*fp32", "eps": "fp32"}
            arguments |= dict.fromkeys(("rows", "x_stride", "residual_stride", "grad_out_stride"), "i32")
            arguments |= {"seed": "i64", "threshold": "i32", "scale": "fp32", "DROP": True, "COLUMNS": columns}
            arguments |= {"BLOCK": launch.block, "ROWS": launch.tile_rows, "CHUNKS": launch.chunks}
            arguments |= {"PAIRS": in_pairs(launch)}
            assert launch.tile_rows == 1 or not backward or launch.chunks > 1 or itemsize == 4  # a warp has one row
            arguments |= {"EVEN": True, "ONE_PASS": itemsize == 2, "ROUNDS": ROUNDS, "STAGES": launch.stages}
            kernel = f"kernels._layer_norm_dropout_add:{'backward' if backward else 'forward'}_kernel"
            job = {"kernel": kernel, "arguments": arguments, "warps": launch.warps, "ptx": True}
            jobs.append(job | {"options": {"maxnreg": launch.registers}})
            launches.append(launch)
            # Three programs beside each other were measured ahead of two, whose registers hold everything.
            spilled.append(40 if launch == Launch(1, 8192, 8, 80) else 0)
    for launch, job, most, report in zip(launches, jobs, spilled, compile_for_hopper(jobs), strict=True):
        assert report["stack"] <= most, job
        assert report["registers"] * 32 * launch.warps <= 65_536, job
        if launch.stages > 1:  # tiles come by asynchronous copies, 16 bytes each, of two tensors
            assert report["ptx"].count("cp.async.cg.shared.global") >= 2
        narrow = {access for access in report["accesses"] if not access.endswith("v4.b32")}
        # Mean, rstd and x's first element, one a row; weight and partial rows, once a program.
        once = {"ld.v2.b32", "st.v2.b32"} if launch.stages > 1 else set()
        assert narrow <= {"ld.b32", "st.b32", "ld.b16"} | once, report["accesses"]


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near, draw):
    rows, columns = 2**31 // 4096 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    x = draw(columns, dtype=torch.bfloat16).expand(rows, columns).contiguous()
    weight, bias = draw(columns, dtype=torch.bfloat16, seed=1), draw(columns, dtype=torch.bfloat16, seed=2)
    out, mean, rstd = layer_norm_dropout_add_forward(x, x, weight, bias, 0.0, SEED)
    assert torch.equal(out[-1], out[0])
    grad_x, _, _ = layer_norm_dropout_add_backward(out, x, weight, mean, rstd, 0.0, SEED)
    assert torch.equal(grad_x[-1], grad_x[0])
    dropped, _, _ = layer_norm_dropout_add_forward(x, x, weight, bias, 0.5, SEED)
    assert not torch.equal(dropped[-1], dropped[0])  # the counter goes on past 2**32 draws
