"""Rotary position embedding against float64 in the rotate-half layout."""

import pytest
import torch

from kernels.rope import rope, rope_backward, rope_forward, warps_for

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tables(length, half, device, dtype=torch.float32, base=10_000.0):
    angle = torch.outer(torch.arange(length).double(), base ** (-torch.arange(half).double() / half))
    return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)


def plain(x, cos, sin, positions):
    """x (B, S, H, D) in float64, the rotated part first."""
    cos, sin = (table.double()[positions].unsqueeze(2).repeat(1, 1, 1, 2) for table in (cos, sin))
    rotated, rest = x.double().split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat([rotated * cos + torch.cat([-second, first], dim=-1) * sin, rest], dim=-1)


def counted(batch, sequence, device):
    return torch.arange(sequence, device=device).expand(batch, sequence)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_shape", "k_heads"),
    [((1, 1, 1, 2), 1), ((2, 5, 4, 16), 2), ((1, 3, 9, 64), 3), ((2, 3, 5, 80), 1), ((1, 2, 3, 6), 3)],
    ids=str,
)
def test_equals_float64_forward_and_backward(q_shape, k_heads, dtype, draw, assert_near):
    batch, sequence, _, width = q_shape
    q, k = draw(*q_shape, dtype=dtype), draw(batch, sequence, k_heads, width, dtype=dtype, seed=1)
    cos, sin = tables(sequence, width // 2, q.device)
    positions = counted(batch, sequence, q.device)
    for call, sign in ((rope_forward, 1.0), (rope_backward, -1.0)):
        q_in, k_in = q.clone(), k.clone()
        q_out, k_out = call(q_in, k_in, cos, sin)
        assert q_out is q_in
        assert k_out is k_in
        assert_near(q_out, plain(q, cos, sign * sin, positions), units=2)
        assert_near(k_out, plain(k, cos, sign * sin, positions), units=2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("form", ["batch", "shared", "flat"])
def test_any_position_ids(form, dtype, draw, assert_near):
    q, k = draw(2, 4, 3, 8), draw(2, 4, 1, 8, seed=1)
    cos, sin = tables(1000, 4, q.device)
    positions = torch.tensor([[999, 0, 7, 7], [3, 2, 1, 500]], device=q.device)
    given = {"batch": positions, "shared": positions[:1], "flat": positions[1]}[form].to(dtype)
    full = given.long().expand(2, 4)
    want = plain(q, cos, sin, full), plain(k, cos, sin, full)
    for actual, expected in zip(rope_forward(q, k, cos, sin, given), want, strict=True):
        assert_near(actual, expected, units=4)


def test_transposed_strides_and_partial_rotation(draw, assert_near):
    q = draw(2, 3, 5, 12).transpose(1, 2)  # (batch, heads, sequence, width) seen as (batch, sequence, heads, width)
    k = draw(2, 2, 5, 12, seed=1).transpose(1, 2)
    cos, sin = tables(5, 4, q.device)
    positions = counted(2, 5, q.device)
    want = plain(q, cos, sin, positions), plain(k, cos, sin, positions)
    rest = q[..., 8:].clone()
    rope_forward(q, k, cos, sin)
    assert_near(q, want[0], units=2)
    assert_near(k, want[1], units=2)
    assert torch.equal(q[..., 8:], rest)


@pytest.mark.parametrize("half", [4, 3])
def test_autograd_equals_autograd_of_the_plain_way(half, draw, gradients, assert_near):
    q, k = draw(2, 5, 4, 8), draw(2, 5, 2, 8, seed=1)
    grads = [draw(2, 5, 4, 8, seed=2), draw(2, 5, 2, 8, seed=3)]
    cos, sin = tables(5, half, q.device)
    positions = counted(2, 5, q.device)
    outputs, got = gradients(lambda q, k: rope(q.clone(), k.clone(), cos, sin, positions), [q, k], grads)
    oracle, want = gradients(
        lambda q, k: (plain(q, cos, sin, positions), plain(k, cos, sin, positions)),
        [q.double(), k.double()],
        [g.double() for g in grads],
    )
    for actual, expected in zip((*outputs, *got), (*oracle, *want), strict=True):
        assert_near(actual, expected, units=4)


@pytest.mark.parametrize("half", [4, 3])
def test_beside_gives_what_in_place_gives_and_keeps_the_inputs(half, draw):
    q, k = draw(2, 4, 5, 8).transpose(1, 2), draw(2, 5, 2, 8, seed=1)
    cos, sin = tables(5, half, q.device)
    kept = q.clone(), k.clone()
    outputs = rope(q, k, cos, sin, inplace=False)
    assert torch.equal(q, kept[0])
    assert torch.equal(k, kept[1])
    assert [output.stride() for output in outputs] == [q.stride(), k.stride()]
    assert all(torch.equal(a, b) for a, b in zip(outputs, rope_forward(q, k, cos, sin), strict=True))


def test_backward_leaves_the_incoming_gradient_alone(draw):
    q, k = draw(1, 3, 2, 8).requires_grad_(), draw(1, 3, 2, 8, seed=1).requires_grad_()
    cos, sin = tables(3, 4, q.device)
    outputs = rope(q.clone(), k.clone(), cos, sin)
    grads = [draw(1, 3, 2, 8, seed=2), draw(1, 3, 2, 8, seed=3)]
    kept = [grad.clone() for grad in grads]
    torch.autograd.backward(outputs, grads)
    assert all(torch.equal(a, b) for a, b in zip(grads, kept, strict=True))
    leaf = q.detach().clone().requires_grad_()
    sum(output.sum() for output in rope(leaf.clone(), k.detach().clone(), cos, sin)).backward()  # stride 0
    assert leaf.grad.isfinite().all()


def test_positions_outside_the_tables_give_nan(draw):
    q, k = draw(1, 4, 2, 8), draw(1, 4, 1, 8, seed=1)
    cos, sin = tables(6, 4, q.device)
    rope_forward(q, k, cos, sin, torch.tensor([0, 6, -1, 5], device=q.device))
    assert q.isnan().all(-1).all(-1).tolist() == [[False, True, True, False]]
    assert k.isnan().any(-1).any(-1).tolist() == [[False, True, True, False]]


def test_magnitudes_nan_and_inf_stay_in_their_pair(draw, assert_near):
    q, k = draw(1, 3, 2, 8, scale=1e4), draw(1, 3, 1, 8, seed=1)
    cos, sin = tables(3, 4, q.device)
    q[0, 1, 1, 2], k[0, 2, 0, 0] = float("nan"), float("inf")
    want = plain(q, cos, sin, counted(1, 3, q.device))
    rope_forward(q, k, cos, sin)
    assert_near(q, want, units=2)
    assert torch.isfinite(k).sum() == k.numel() - 2


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_empty(shape, draw):
    q, k = draw(*shape, 2, 8), draw(*shape, 1, 8)
    cos, sin = tables(4, 4, q.device)
    assert rope_forward(q, k, cos, sin)[0].shape == (*shape, 2, 8)


def test_bad_input_is_named(draw):
    q, k = draw(1, 3, 2, 8), draw(1, 3, 1, 8)
    cos, sin = tables(3, 4, q.device)
    ids = torch.zeros(3, dtype=torch.long, device=q.device)
    for arguments, message in [
        ((q.double(), k.double(), cos, sin), "q: dtype"),
        ((q, k.half(), cos, sin), "k: dtype"),
        ((q[0], k, cos, sin), "q: shape"),
        ((q, k[:, :2], cos, sin), "k: shape"),
        ((q.transpose(2, 3), k.transpose(2, 3), cos, sin), "q: its last dimension"),
        ((q, k, cos[:, :3], sin), "contiguous"),
        ((q, k, cos, sin[:2]), "sin: shape"),
        ((q, k, cos[:2], sin[:2]), "cos: has 2 positions"),
        ((q, k, cos.half(), sin.half()), "cos: dtype"),
        ((q, k, *tables(3, 5, q.device)), "rotate more"),
        ((q, k, cos, sin, ids.float()), "positions: torch.float32"),
        ((q, k, cos, sin, ids[:2]), "positions: shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            rope_forward(*arguments)


@pytest.mark.slow
def test_compiled_for_hopper_with_16_byte_accesses(compile_for_hopper):
    strides = [f"{t}_{s}" for t in ("q", "k", "q_out", "k_out") for s in ("batch", "token", "head")]
    arguments = dict.fromkeys([*strides, "sequence", "table_length", "position_batch"], "i32")
    arguments |= dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "*bf16")
    arguments |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "position_ptr": "*i64", "position_token": 1}
    arguments |= {"HAS_POSITIONS": True, "BACKWARD": False, "Q_HEADS": 32, "K_HEADS": 8, "HALF": 64}
    arguments |= {"BLOCK_Q": 32, "BLOCK_K": 8, "BLOCK": 64}
    job = {"kernel": "kernels.rope:_rope_kernel", "arguments": arguments, "warps": warps_for(32, 8, 64, 2)}
    (report,) = compile_for_hopper([job])
    assert report["stack"] == 0
    assert report["registers"] <= 128
    # The eight key heads are half a tile for these warps: 8 bytes a thread.
    assert set(report["accesses"]) <= {"ld.v4.b32", "st.v4.b32", "ld.v2.b32", "st.v2.b32", "ld.b64"}
    assert report["accesses"]["st.v4.b32"] >= 4


@pytest.mark.gpu
def test_offsets_past_two_to_the_31(assert_near):
    tokens = 2**31 // (32 * 128) + 3
    if torch.cuda.mem_get_info()[0] < 2**33:
        pytest.skip("needs 8 GiB of free GPU memory")
    q = torch.full((1, tokens, 32, 128), 0.5, dtype=torch.bfloat16, device="cuda")
    k = torch.full((1, tokens, 1, 128), 0.5, dtype=torch.bfloat16, device="cuda")
    cos, sin = tables(tokens, 64, q.device)
    rope_forward(q, k, cos, sin)
    start = torch.full((1, 1, 32, 128), 0.5, device="cuda")
    assert_near(q[:, -1:], plain(start, cos, sin, torch.tensor([[tokens - 1]], device="cuda")), units=2)
