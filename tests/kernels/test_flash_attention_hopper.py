"""The Hopper forward: its logic on threads against float64, what it refuses, and on a Hopper GPU the kernel itself."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.flash_attention import flash_attention
from kernels.flash_attention_hopper import hopper_forward_kernel
from kernels.flash_attention_hopper_backward import hopper_backward_kernel
from kernels.flash_attention_hopper_launch import (
    HopperTile,
    hopper_backward_launch,
    hopper_forward_launch,
    hopper_tile,
    unsupported_by_hopper,
)
from kernels.flash_attention_plan import Config, Tile, choose_config, is_describable
from kernels.flash_attention_problem import Problem

_SPEC = importlib.util.spec_from_file_location("gluon_on_threads", Path(__file__).with_name("gluon_on_threads.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
threads: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(threads)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def problem(batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, causal: bool) -> Problem:
    return Problem(
        batch, heads, kv_heads, q_len, kv_len, dim, None, 0 if causal else None, dim**-0.5, 0.0, varlen=False
    )


def draw(p: Problem, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(p.q_len * 1000 + p.kv_len)
    shapes = [(p.q_len, p.heads), (p.kv_len, p.kv_heads), (p.kv_len, p.kv_heads)]
    return [torch.randn(p.batch, *shape, p.head_dim, generator=generator).to(dtype) for shape in shapes]


def exact(p: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = p.heads // p.kv_heads
    q, k, v = q.double(), k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * p.scale
    if p.right == 0:
        positions = torch.arange(p.q_len)[:, None] + p.kv_len - p.q_len
        scores = scores.masked_fill(torch.arange(p.kv_len)[None] > positions, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def on_threads(p: Problem, tile: HopperTile, programs: int) -> tuple[torch.Tensor, ...]:
    q, k, v = draw(p, torch.float16)
    out, lse = torch.full_like(q, float("nan")), torch.full((p.batch, p.heads, p.q_len), float("nan"))
    args = dict(hopper_forward_launch(p, tile, q, k, v, out, lse).args)
    args |= {
        "q_desc": threads.heads_first(q, 64), "k_desc": threads.heads_first(k, tile.block_n),
        "v_desc": threads.heads_first(v, tile.block_n), "o_desc": threads.heads_first(out, 64),
        "lse_ptr": threads.Memory(lse.view(-1)),
        "counter_ptr": args["counter_ptr"] is not None and threads.Memory(args["counter_ptr"]),
    }  # fmt: skip
    threads.run_on_threads(hopper_forward_kernel, programs, args)
    return q, k, v, out, lse


SHAPES = [
    # batch, heads, key heads, queries, keys, dimension, causal, programs
    (1, 2, 2, 256, 384, 64, False, 2),
    (2, 2, 1, 200, 300, 64, False, 3),
    (1, 2, 2, 256, 256, 64, True, 2),
    (2, 4, 2, 130, 700, 64, True, 3),
    (1, 2, 1, 300, 130, 64, True, 1),  # the first queries stand before every key
    (1, 1, 1, 1, 1, 128, True, 1),
    (1, 1, 1, 333, 517, 128, True, 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "tile",
    [
        HopperTile(),
        HopperTile(64, 3, True),
        HopperTile(q_slots=2),
        HopperTile(64, 2, True, "counter", 2),
        HopperTile(groups=3),
        HopperTile(64, 3, True, "counter", 2, groups=3),
        HopperTile(64, 2, True, groups=3),
    ],
    ids=str,
)
def test_the_partitions_together_compute_attention(shape: tuple[Any, ...], tile: HopperTile) -> None:
    p = problem(*shape[:7])
    if tile.groups == 3 and p.head_dim != 64:
        with pytest.raises(ValueError, match="takes a head dimension of 64, not 128; use two groups"):
            on_threads(p, tile, shape[7])
        return
    q, k, v, out, lse = on_threads(p, tile, shape[7])
    expected, expected_lse = exact(p, q, k, v)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_partitions_together_compute_the_gradients(shape: tuple[Any, ...]) -> None:
    p = problem(*shape[:7])
    q, k, v = draw(p, torch.float16)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to(q.dtype)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    out, lse = exact(p, *leaves)
    expected = torch.autograd.grad(out, leaves, grad.double())
    out, lse = out.detach(), lse.detach()
    shift, delta = (torch.zeros(p.batch, p.heads, (p.q_len + 3) // 4 * 4)[..., : p.q_len] for _ in range(2))
    shift.copy_(torch.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634))
    delta.copy_((out * grad).sum(-1).transpose(1, 2))
    dk, dv = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
    sums = torch.zeros(q.shape)
    args = dict(hopper_backward_launch(p, (q, k, v, grad), dk, dv, sums, shift, delta).args)
    programs = -(-p.kv_len // 128) * p.batch * p.kv_heads
    block = args["BLOCK_M"]
    args |= {
        "q_desc": threads.heads_first(q, block), "k_desc": threads.heads_first(k, 128),
        "v_desc": threads.heads_first(v, 64), "do_desc": threads.heads_first(grad, block),
        "shift_desc": threads.Descriptor(shift.reshape(-1, p.q_len), [1, block]),
        "delta_desc": threads.Descriptor(delta.reshape(-1, p.q_len), [1, block]),
        "dk_desc": threads.heads_first(dk, 64), "dv_desc": threads.heads_first(dv, 64),
        "dq_desc": threads.Descriptor(sums.permute(0, 2, 1, 3), [1, 1, 64, 64]),
    }  # fmt: skip
    threads.run_on_threads(hopper_backward_kernel, programs, args)
    for name, got, truth in zip("qkv", (sums * p.scale, dk, dv), expected, strict=True):
        error, largest = (got.double() - truth).abs().max().item(), truth.abs().max().item()
        assert error <= 4e-3 * max(1.0, largest), f"d{name}: off by {error:.3g}, the largest is {largest:.3g}"


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3], SHAPES[6]], ids=str)
def test_nothing_is_read_before_its_copy_is_waited_for(shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LATE", True)
    for tile in (HopperTile(), HopperTile(64, 2, True, "counter", 2), HopperTile(64, 2, True, "counter", 2, 3)):
        test_the_partitions_together_compute_attention(shape, tile)
    test_the_partitions_together_compute_the_gradients(shape)


def test_nothing_is_read_after_its_slot_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PAUSE_S", 0.002)
    for groups in (2, 3):
        tile = HopperTile(64, 2, True, "counter", 2, groups)
        test_the_partitions_together_compute_attention(SHAPES[3], tile)
    test_the_partitions_together_compute_the_gradients(SHAPES[3])
    test_the_partitions_together_compute_the_gradients(SHAPES[1])


def test_a_slot_freed_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in would notice a missing barrier: without waiting for empty slots the numbers come out wrong."""
    slow = threads.Barrier.wait

    def careless(self: Any, parity: int) -> None:
        if self.count == 1 or self.bytes:  # slots of keys and values are emptied by two arrivals: skip just those
            slow(self, parity)

    monkeypatch.setattr(threads.Barrier, "wait", careless)
    monkeypatch.setattr(threads, "WAIT_S", 1.0)
    p = problem(1, 1, 1, 128, 1024, 64, causal=False)
    try:
        q, k, v, out, _ = on_threads(p, HopperTile(), 1)
    except (AssertionError, TimeoutError):
        return
    assert not torch.allclose(out.double(), exact(p, q, k, v)[0], rtol=2e-3, atol=2e-3)


def test_what_the_kernel_does_not_support_is_named() -> None:
    p = problem(1, 2, 2, 64, 64, 128, causal=True)
    assert unsupported_by_hopper(p) is None
    assert "head dimensions 64 and 128" in str(unsupported_by_hopper(replace(p, head_dim=96)))
    assert "softcap" in str(unsupported_by_hopper(replace(p, softcap=30.0)))
    assert "window" in str(unsupported_by_hopper(replace(p, left=5)))
    assert "cu_seqlens_q" in str(unsupported_by_hopper(replace(p, varlen=True)))
    t, lse = torch.zeros(1, 64, 2, 96, dtype=torch.float16), torch.zeros(1, 2, 64)
    with pytest.raises(ValueError, match="head dimensions 64 and 128"):
        hopper_forward_launch(replace(p, head_dim=96), HopperTile(), t, t, t, t, lse)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (HopperTile, {"stages": 0}),
        (HopperTile, {"order": "Counter"}),
        (HopperTile, {"block_n": 96}),
        (HopperTile, {"q_slots": 3}),
        (HopperTile, {"groups": 4}),
    ],
    ids=str,
)
def test_a_tile_that_the_kernels_do_not_know_is_refused(kind: Any, field: dict[str, Any]) -> None:
    (name,) = field
    with pytest.raises(ValueError, match=f"{name}: .* is not supported; use "):
        kind(**field)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("shape", [s[:7] for s in SHAPES] + [(2, 64, 16, 1000, 1500, 128, True)], ids=str)
@pytest.mark.parametrize("ping_pong", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_kernel_on_its_gpu(shape: tuple[Any, ...], ping_pong: bool, dtype: torch.dtype) -> None:
    p = problem(*shape)
    q, k, v = draw(p, dtype)
    tile = replace(hopper_tile(p), ping_pong=ping_pong)
    config = Config(Tile(128, 64, 4, 2), Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), True, True, False, tile, True)
    leaves = [t.cuda().requires_grad_() for t in (q, k, v)]
    out, lse = flash_attention(*leaves, causal=p.right == 0, return_lse=True, config=config)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = exact(p, *wide)
    torch.testing.assert_close(out.detach().cpu().double(), expected.detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.detach().cpu().double(), expected_lse.detach(), rtol=1e-3, atol=1e-3)
    grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).to(q.dtype)
    got = torch.autograd.grad(out, leaves, grad.cuda())
    for ours, truth in zip(got, torch.autograd.grad(expected, wide, grad.double()), strict=True):
        largest = max(1.0, truth.abs().max().item())
        assert (ours.cpu().double() - truth).abs().max().item() <= 2e-2 * largest


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tile", ["fixed q1", "fixed q2", "grid q1", "counter q1", "counter q2"])
def test_every_order_gives_every_tile_on_its_gpu(tile: str, causal: bool) -> None:
    """Grouped heads, odd lengths, several tiles to a program; a tile that nobody computes would show as NaN."""
    order, q_slots = tile.split(" q")
    p = problem(2, 64, 16, 1000, 1500, 128, causal)
    q, k, v = draw(p, torch.bfloat16)
    expected, expected_lse = exact(p, q, k, v)
    out = torch.full(q.shape, float("nan"), dtype=q.dtype, device="cuda")
    lse = torch.full((2, 64, 1000), float("nan"), device="cuda")
    chosen: Any = replace(hopper_tile(p), order=order, q_slots=int(q_slots))
    hopper_forward_launch(p, chosen, q.cuda(), k.cuda(), v.cuda(), out, lse).run()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=1e-3, atol=1e-3)


def test_the_kernel_is_chosen_where_it_was_measured_ahead_and_nowhere_else() -> None:
    p = problem(2, 4, 2, 1000, 1500, 128, causal=True)
    chosen = {
        (dim, causal): choose_config(problem(2, 4, 2, 1000, 1500, dim, causal), (9, 0), True).describe()
        for dim in (64, 128)
        for causal in (False, True)
    }
    assert chosen == {
        (64, False): "forward gluon, 192x128 s3 taking turns counter q2; backward gluon, one pass, dQ in bulk",
        (64, True): "forward triton, descriptors, 64x64 w4 s3; backward gluon, one pass, dQ in bulk",
        (128, False): "forward gluon, 128x128 s2 taking turns q2; backward gluon, one pass, dQ in bulk",
        (128, True): "forward gluon, 128x128 s2 counter q2; backward gluon, one pass, dQ in bulk",
    }, "the record says which kernels run"
    long = choose_config(problem(2, 4, 2, 4097, 4097, 64, True), (9, 0), True).describe()
    assert long.startswith("forward gluon, 192x128 s3 taking turns counter q2; "), "Gluon in long walks"
    short = choose_config(problem(2, 4, 2, 4096, 9000, 64, True), (9, 0), True).describe()
    assert short.startswith("forward triton")
    elsewhere = [((8, 0), True, p), ((10, 0), True, p), ((12, 0), True, p), (None, True, p), ((9, 0), False, p)]
    others: list[dict[str, Any]] = [
        {"head_dim": 96}, {"head_dim": 256}, {"softcap": 30.0}, {"left": 5}, {"right": 3}, {"varlen": True},
        {"head_dim": 64, "right": None, "varlen": True},
    ]  # fmt: skip
    for capability, describable, other in elsewhere + [((9, 0), True, replace(p, **change)) for change in others]:
        config = choose_config(other, capability, describable)
        assert config.hopper is None, f"{capability} {other}"
        assert config.describe().startswith("forward triton")
        assert not config.hopper_backward


def test_where_triton_runs_on_hopper_it_takes_the_measured_backward() -> None:
    packed = replace(problem(2, 4, 2, 1000, 1500, 128, causal=True), varlen=True)
    small, full = replace(packed, head_dim=64), replace(packed, head_dim=64, right=None)
    said = [choose_config(p, (9, 0), True).describe().split("backward ")[1] for p in (packed, small, full)]
    assert said == [
        "triton, descriptors, 64x128 w8 s2 in two passes, dV beside",
        "triton, descriptors, 64x64 w4 s2 in one pass",
        "triton, descriptors, 64x64 w4 s2 in one pass, dV beside, dK beside",
    ]


def test_the_chosen_kernel_can_be_launched_for_every_problem_it_is_chosen_for() -> None:
    for q_len, kv_len, causal, kv_heads in [
        (1, 1, True, 4),
        (1, 3000, False, 2),
        (300, 130, True, 1),
        (64, 64, False, 4),
    ]:
        p = problem(2, 4, kv_heads, q_len, kv_len, 128, causal)
        q, k, v = draw(p, torch.float16)
        lse = torch.empty(2, 4, q_len)
        config = choose_config(p, (9, 0), all(is_describable(t) for t in (q, k, v)))
        launch = hopper_forward_launch(p, config.hopper, q, k, v, torch.empty_like(q), lse)
        assert launch.args["CAUSAL"] == causal
        assert launch.grid[0] <= -(-q_len // 128) * 8


def test_tensors_that_the_copy_engine_cannot_address_run_on_triton() -> None:
    p = problem(1, 2, 2, 32, 32, 128, causal=True)
    whole = torch.zeros(1, 32, 2, 129, dtype=torch.float16)
    q = whole[..., 1:]
    assert not is_describable(q)
    assert choose_config(p, (9, 0), is_describable(q)).describe().startswith("forward triton, pointers")


def test_a_refused_base_or_stride_is_mended_by_what_the_refusal_says() -> None:
    p = problem(1, 2, 2, 32, 32, 64, causal=True)
    good, lse = torch.zeros(1, 32, 2, 64, dtype=torch.float16), torch.zeros(1, 2, 32)
    late = torch.zeros(3 + good.numel(), dtype=torch.float16)[3:].view(good.shape)  # contiguous as it is
    for bad in (late, torch.zeros(1, 32, 2, 65, dtype=torch.float16)[..., 1:], good[:, :, :1].expand(1, 32, 2, 64)):
        with pytest.raises(ValueError, match=r"q: .* call \.clone\(\) first"):
            hopper_forward_launch(p, hopper_tile(p), bad, good, good, good, lse)
        hopper_forward_launch(p, hopper_tile(p), bad.clone(), good, good, good, lse)
        with pytest.raises(ValueError, match=r"grad_out: .* call \.clone\(\) first"):
            hopper_backward_launch(p, (good, good, good, bad), good, good, good.float(), lse, lse)
        hopper_backward_launch(p, (good, good, good, bad.clone()), good, good, good.float(), lse, lse)
