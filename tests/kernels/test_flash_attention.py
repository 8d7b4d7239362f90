"""flash_attention against the plain formula in float64, over options drawn at random and on hostile input.

Runs in Triton's interpreter on CPU tensors, or on a GPU. The rule: at most twice the error of the plain formula in
the same precision, or one rounding of the largest value.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from kernels.flash_attention import flash_attention
from kernels.flash_attention_hopper_launch import HopperTile
from kernels.flash_attention_plan import Config, Tile

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float32, torch.float16]
# In float32 the probabilities recomputed from the log-sum-exp carry its rounding and the score's, a few units.
ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DESCRIBED = Config(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), descriptors=True)


def visible_mask(q_len: int, kv_len: int, causal: bool, window: Any) -> torch.Tensor:
    positions = torch.arange(q_len)[:, None] + kv_len - q_len
    keys = torch.arange(kv_len)[None, :]
    left, right = window or (None, None)
    right = 0 if causal else right
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left is not None:
        mask &= keys >= positions - left
    if right is not None:
        mask &= keys <= positions + right
    return mask


def plain_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain formula of one sequence, [S, H, D], in the dtype of q; softmax in at least float32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (torch.einsum("qhd,khd->hqk", q, k)).to(wide) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask.to(q.device), float("-inf"))
    lse = torch.logsumexp(scores, -1)
    p = torch.exp(scores - torch.where(lse == float("-inf"), 0.0, lse)[..., None])
    return torch.einsum("hqk,khd->qhd", p.to(q.dtype), v), lse


@dataclass
class Draw:
    """One draw of the option grid, with the tensors it needs."""

    lengths: list[tuple[int, int]]
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    causal: bool = False
    window: Any = None
    softcap: float = 0.0
    scale: float | None = None
    varlen: bool = False
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and the output's gradient, packed [T, H, D]."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens_q, tokens_k = (sum(pair[i] for pair in self.lengths) for i in (0, 1))
        shapes = [(tokens_q, self.heads), (tokens_k, self.kv_heads), (tokens_k, self.kv_heads), (tokens_q, self.heads)]
        return [torch.randn(*shape, self.head_dim, generator=generator).to(self.dtype).to(DEVICE) for shape in shapes]

    def plain(self, tensors: list[torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        q, k, v, do = (t.detach().to(dtype) for t in tensors)
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        scale = self.scale or self.head_dim**-0.5
        outs, lses, at_q, at_k = [], [], 0, 0
        for n, m in self.lengths:
            mask = visible_mask(n, m, self.causal, self.window)
            part = plain_one(q[at_q : at_q + n], k[at_k : at_k + m], v[at_k : at_k + m], mask, scale, self.softcap)
            outs.append(part[0])
            lses.append(part[1])
            at_q, at_k = at_q + n, at_k + m
        out = torch.cat(outs)
        out.backward(do)
        return {"out": out.detach(), "lse": torch.cat(lses, 1).detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}

    def run(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        q, k, v, do = (t.detach().clone() for t in tensors)
        kwargs = dict(causal=self.causal, window=self.window, softcap=self.softcap, scale=self.scale, **self.options)
        if self.varlen:
            for i, name in enumerate(("q", "k")):
                sizes = [pair[i] for pair in self.lengths]
                cu = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).to(DEVICE)
                kwargs |= {f"cu_seqlens_{name}": cu, f"max_seqlen_{name}": max(sizes)}
        else:
            n, m, batch = *self.lengths[0], len(self.lengths)
            q, do = q.view(batch, n, *q.shape[1:]), do.view(batch, n, *q.shape[1:])
            k, v = k.view(batch, m, *k.shape[1:]), v.view(batch, m, *k.shape[1:])
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        out, lse = flash_attention(q, k, v, return_lse=True, **kwargs)
        out.backward(do)
        if not self.varlen:
            lse = lse.transpose(0, 1)
        got = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
        rows = {"out": self.heads, "dq": self.heads, "dk": self.kv_heads, "dv": self.kv_heads}
        return {
            n: t.reshape(self.heads, -1) if n == "lse" else t.reshape(-1, rows[n], self.head_dim)
            for n, t in got.items()
        }


def assert_right(draw: Draw, tensors: list[torch.Tensor] | None = None) -> None:
    tensors = draw.tensors() if tensors is None else tensors
    got = draw.run(tensors)
    exact = draw.plain(tensors, torch.float64)
    plain = draw.plain(tensors, draw.dtype)
    # A score is a sum that a BLAS adds in an order of its own, by shape and processor; the backward computes it again
    # and adds in another. Each probability is off by a rounding of the largest score, whatever the plain way's luck.
    q, k, v, do = (t.double() for t in tensors)
    scale, do_norm = draw.scale or draw.head_dim**-0.5, do.norm(dim=-1).max().item()
    score = scale * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item()
    scored = 2.0**-24 * (min(score, draw.softcap) if draw.softcap else score)
    # dQ and dK are sums of differences dP - delta that vanish where a query sees one key; delta is summed from the
    # rounded output. What is left is the rounding of the terms, which the plain formula shows only over many keys.
    term = ROUNDING[draw.dtype] / 2 * v.abs().max().item() + (2.0**-22 + scored) * v.norm(dim=-1).max().item()
    term *= scale * do_norm
    floor = {
        "dq": term * k.abs().max().item(),
        "dk": term * q.abs().max().item(),
        "lse": 2.0**-22 * (1 + draw.softcap) + scored,
    }
    # tanh through exp2 is exact to a float32 rounding of 1, so a capped score to one of the cap.
    unit = ROUNDING[draw.dtype] + draw.softcap * 2.0**-22 + scored
    # With two or three keys the plain formula's error on one gradient may be small by luck: pool the three.
    pooled = max(relative_error(plain[name], exact[name]) for name in ("dq", "dk", "dv"))
    for name, truth in exact.items():
        out = got[name].double()
        finite = truth.isfinite()
        assert out.shape == truth.shape, f"{name}: shape {tuple(out.shape)}, expected {tuple(truth.shape)}"
        assert torch.equal(out[~finite], truth[~finite]), f"{name}: differs where the plain formula is infinite"
        assert not out.isnan().any(), f"{name}: NaN"
        if not finite.any():
            continue
        largest = truth[finite].abs().max().item()
        allowed = pooled if name in ("dq", "dk", "dv") else relative_error(plain[name], truth)
        bound = max(2 * allowed * largest, unit * largest + floor.get(name, 0.0))
        worst = (out - truth)[finite].abs().max().item()
        assert worst <= bound, f"{name}: largest error {worst:.3g}, allowed {bound:.3g} ({draw})"


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The largest error over the largest magnitude, both over what is finite."""
    finite = truth.isfinite()
    if not finite.any():
        return 0.0
    largest = truth[finite].abs().max().item()
    return (got.double() - truth)[finite].abs().max().item() / largest if largest else 0.0


def random_draw(seed: int) -> Draw:
    rng = random.Random(seed)
    varlen = rng.random() < 0.35
    batch = rng.choice([1, 2, 3])
    length = lambda: rng.choice([1, 2, rng.randint(3, 40), rng.randint(20, 75)])  # noqa: E731
    shape = (length(), length())
    lengths = (
        [(rng.choice([0, length()]), rng.choice([0, length()])) for _ in range(batch)] if varlen else [shape] * batch
    )
    if not any(n for n, _ in lengths) or not any(m for _, m in lengths):
        lengths[0] = shape
    kv_heads = rng.choice([1, 2])
    bound = lambda: rng.choice([None, 0, 1, rng.randint(2, 40)])  # noqa: E731
    return Draw(
        lengths=lengths,
        heads=kv_heads * rng.choice([1, 1, 2, 3]),
        kv_heads=kv_heads,
        head_dim=rng.choice([16, 32, 64, 96]),
        dtype=rng.choice(DTYPES),
        causal=rng.random() < 0.5,
        window=(bound(), bound()) if rng.random() < 0.4 else None,
        softcap=rng.choice([0.0, 0.0, 2.0, 30.0]),
        scale=rng.choice([None, None, 0.3]),
        varlen=varlen,
        seed=seed,
        options={
            "deterministic": rng.random() < 0.4,
            "config": None if rng.random() < 0.6 or CUDA else DESCRIBED,
        },
    )


@pytest.mark.parametrize("seed", range(24))
def test_forward_and_gradients_over_random_options(seed: int) -> None:
    assert_right(random_draw(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 220))
def test_forward_and_gradients_over_more_random_options(seed: int) -> None:
    assert_right(random_draw(seed))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dimensions(head_dim: int) -> None:
    assert_right(Draw([(37, 45)], 2, 1, head_dim, DTYPES[0], causal=True))


def test_one_very_large_logit_takes_all_the_weight() -> None:
    for dtype, size in ((DTYPES[0], 300.0), (torch.float16, 30000.0)):
        draw = Draw([(35, 51)], 2, 2, 64, dtype)
        tensors = draw.tensors()
        tensors[0][17, 1, 5] = size
        tensors[1][23, 1, 5] = size
        got = draw.run(tensors)
        assert all(t.isfinite().all() for t in got.values())
        # Where scale and shift are one fused multiply-add, the weight is a power of two near 1, rounded before the sum.
        torch.testing.assert_close(got["out"][17, 1], tensors[2][23, 1], rtol=2e-3 if CUDA else 1e-6, atol=0)
        assert got["lse"][1, 17].item() == pytest.approx(size * size / 8, rel=1e-3)
        exact = draw.plain(tensors, torch.float64)
        torch.testing.assert_close(got["out"].double(), exact["out"], rtol=0, atol=2e-3)
        if size == 300.0:  # the backward's probabilities are good to |score| · 2⁻²⁴, and no more
            torch.testing.assert_close(got["dv"].double(), exact["dv"], rtol=0, atol=8e-3)


def test_rows_whose_scores_grow_from_tile_to_tile() -> None:
    """Old sums are rescaled by 2^-30 at every tile of keys, in one row of a tile or in all."""
    for rows in (slice(None), slice(17, 18)):
        draw = Draw([(40, 61)], 1, 1, 16, DTYPES[0])
        tensors = draw.tensors()
        tensors[0][rows, :, 0] = 1.0
        steps = torch.arange(61, device=DEVICE) // 16 * (30 * math.log(2) * 16**0.5)
        tensors[1][..., 0] = steps[:, None].to(tensors[1])
        assert_right(draw, tensors)


@pytest.mark.parametrize("options", [{}, {"config": DESCRIBED}, {"deterministic": True}], ids=str)
def test_rows_that_see_no_key_give_zero_and_minus_infinity(options: dict[str, Any]) -> None:
    if CUDA and "config" in options:
        pytest.skip("the interpreter's tiles; a GPU uses descriptors by itself")
    draw = Draw(
        [(40, 9)], 2, 1, 32, DTYPES[0], causal=True, options=options
    )  # the first 31 queries stand before all keys
    got = draw.run(draw.tensors())
    assert (got["out"][:31] == 0).all()
    assert (got["out"][31:] != 0).any(-1).all()
    assert (got["lse"][:, :31] == float("-inf")).all()
    assert (got["dq"][:31] == 0).all()
    assert_right(draw)


def test_a_window_that_no_query_fills_masks_everything() -> None:
    draw = Draw([(8, 33)], 1, 1, 16, DTYPES[0], window=(None, 0))
    assert_right(draw)
    q, k, v, _ = draw.tensors()
    out, lse = flash_attention(q[None], k[None, :0], v[None, :0], causal=True, return_lse=True)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_one_query_one_key_returns_the_value() -> None:
    draw = Draw([(1, 1)], 1, 1, 64, DTYPES[0])
    q, k, v, _ = draw.tensors()
    out = flash_attention(q[None], k[None], v[None])
    assert torch.equal(out[0], v)
    assert_right(draw)


def test_an_empty_sequence_in_a_packed_batch_disturbs_none() -> None:
    draw = Draw([(19, 19), (0, 0), (0, 7), (5, 0), (33, 40)], 2, 1, 32, DTYPES[0], causal=True, varlen=True)
    assert_right(draw)


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # the interpreter's row maximum of NaN
def test_sequences_of_a_packed_batch_do_not_read_each_other() -> None:
    for config in (None,) if CUDA else (None, DESCRIBED):
        draw = Draw([(19, 19), (21, 21)], 1, 1, 32, DTYPES[0], varlen=True, options={"config": config})
        tensors = draw.tensors()
        before = draw.run(tensors)
        for tensor in tensors:
            tensor[19:] = float("nan")
        after = draw.run(tensors)
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(before[name][:19], after[name][:19]), name
            assert after[name][19:].isnan().any(), name


@pytest.mark.parametrize("varlen", [False, True])
def test_the_deterministic_backward_repeats_to_the_bit(varlen: bool) -> None:
    draw = Draw([(70, 70)] * 2, 4, 2, 32, DTYPES[0], causal=True, varlen=varlen, options={"deterministic": True})
    tensors = draw.tensors()
    first, second = draw.run(tensors), draw.run(tensors)
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_the_gradient_of_the_log_sum_exp() -> None:
    q, k, v, _ = (t[None].float().requires_grad_() for t in Draw([(9, 21)], 2, 1, 16, DTYPES[0]).tensors())
    if CUDA:
        q, k, v = (t.detach().to(DTYPES[0]).requires_grad_() for t in (q, k, v))
    weights = torch.randn(1, 2, 9, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    lse = flash_attention(q, k, v, return_lse=True)[1]
    (lse * weights).sum().backward()
    exact_q, exact_k = (t.detach().double().requires_grad_() for t in (q, k))
    scores = torch.einsum("bqhd,bkhd->bhqk", exact_q, exact_k.repeat_interleave(2, 2)) * 16**-0.5
    (scores.logsumexp(-1) * weights).sum().backward()
    tolerance = 1e-5 if q.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(q.grad.double(), exact_q.grad, rtol=0, atol=tolerance)
    torch.testing.assert_close(k.grad.double(), exact_k.grad, rtol=0, atol=tolerance)
    assert (v.grad == 0).all()


def test_strided_views_are_read_in_place() -> None:
    draw = Draw([(23, 23)], 2, 2, 32, DTYPES[0])
    q, k, v, _ = draw.tensors()
    packed = torch.stack([q, k, v], 1)[None]  # [1, S, 3, H, D], as one projection makes them
    heads_first = [t[None].transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    expected = flash_attention(q[None], k[None], v[None])
    assert torch.equal(flash_attention(*packed.unbind(2)), expected)
    assert torch.equal(flash_attention(*heads_first), expected)
    shifted = torch.zeros(1, 23, 2, 33, dtype=q.dtype, device=DEVICE)[..., 1:]  # rows that are not 16-byte aligned
    shifted.copy_(q)
    assert torch.equal(flash_attention(shifted, k[None], v[None]), expected)


def test_an_expanded_gradient_is_accepted() -> None:
    q, k, v = (t[None].requires_grad_() for t in Draw([(12, 12)], 1, 1, 16, DTYPES[0]).tensors()[:3])
    flash_attention(q, k, v).sum().backward()
    assert v.grad is not None
    torch.testing.assert_close(v.grad.sum(1), torch.full_like(v.grad[:, 0], 12.0), rtol=1e-2, atol=0)


@pytest.mark.parametrize("config", [None, DESCRIBED], ids=["picked", "descriptors"])
def test_a_gradient_that_starts_anywhere_is_accepted(config: Config | None) -> None:
    """What follows three numbers in a longer tensor is contiguous, and starts where the copy engine cannot."""
    if CUDA and config is not None:
        pytest.skip("the interpreter's tiles; a GPU uses descriptors by itself")
    q, k, v, grad = (t[None] for t in Draw([(20, 20)], 2, 2, 64, DTYPES[0]).tensors())
    odd = torch.cat([grad.new_zeros(3), grad.flatten()])[3:].view(grad.shape)
    assert odd.is_contiguous()
    assert odd.data_ptr() % 16
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = flash_attention(*leaves, config=config)
    expected = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out, leaves, odd), expected, rtol=1e-2, atol=1e-2)


def refused(**changes: Any) -> str:
    shape = (2, 8, 4, 64)
    call: dict[str, Any] = {name: torch.zeros(shape, dtype=DTYPES[0], device=DEVICE) for name in ("q", "k", "v")}
    call |= changes
    with pytest.raises(ValueError, match=r".") as caught:
        flash_attention(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    return str(caught.value)


def tensor(*shape: int, dtype: torch.dtype = DTYPES[0]) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


def test_refusals_name_the_argument_and_what_is_supported() -> None:
    assert "q: dtype torch.float64" in (text := refused(q=tensor(2, 8, 4, 64, dtype=torch.float64)))
    assert "bfloat16" in text
    other = torch.bfloat16 if DTYPES[0] != torch.bfloat16 else torch.float16
    assert "v: dtype" in refused(v=tensor(2, 8, 4, 64, dtype=other))
    assert "q: head dimension 80" in (text := refused(**{n: tensor(2, 8, 4, 80) for n in "qkv"}))
    assert "64, 96, 128, 256" in text
    assert "k: head dimension 32" in refused(k=tensor(2, 8, 4, 32), v=tensor(2, 8, 4, 32))
    assert "k: its last dimension has stride 32" in refused(k=tensor(2, 64, 4, 8).transpose(1, 3))
    assert "k: 3 heads do not divide q's 4" in refused(k=tensor(2, 8, 3, 64), v=tensor(2, 8, 3, 64))
    assert "v: shape" in refused(v=tensor(2, 9, 4, 64))
    assert "k: batch 3" in refused(k=tensor(3, 8, 4, 64), v=tensor(3, 8, 4, 64))
    assert "q: shape" in refused(q=tensor(8, 4, 64))
    assert "meta" in refused(q=torch.empty(2, 8, 4, 64, dtype=DTYPES[0], device="meta"))
    assert "softcap" in refused(softcap=-1.0)
    assert "scale" in refused(scale=0.0)
    assert "window" in refused(window=(-1, 0))
    assert "window" in refused(window=5)
    assert "max_seqlen_q" in refused(max_seqlen_q=8)


def test_a_choice_of_kernels_that_cannot_run_is_refused() -> None:
    """Wrong kernels never run silently in the place of those that were asked for."""
    config = Config(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))
    asked: Any = "hopper"
    assert "config: 'hopper'" in refused(config=asked)
    assert "config: beside=('dQ',)" in refused(config=replace(config, beside=("dQ",)))
    odd = tensor(2, 8, 4, 65)[..., 1:]
    assert "v: descriptors need" in refused(v=odd, config=replace(config, descriptors=True))
    assert "config: hopper=True" in refused(config=replace(config, hopper=True))
    tiles = replace(config, hopper=HopperTile(), hopper_backward=True)
    assert "softcap: the Hopper kernel has none" in refused(softcap=5.0, config=tiles)
    if not CUDA or torch.cuda.get_device_capability() != (9, 0):
        assert "q: the Hopper kernels need a GPU of compute capability 9.0" in refused(config=tiles)


def test_refusals_of_packed_batches() -> None:
    cu = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
    call = {n: tensor(8, 4, 64) for n in "qkv"}
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
    assert "cu_seqlens_k: missing" in refused(**call, **(lengths | {"cu_seqlens_k": None}))
    assert "cu_seqlens_q: torch.int64" in refused(**call, **(lengths | {"cu_seqlens_q": cu.long()}))
    assert "cu_seqlens_k: 2 entries" in refused(**call, **(lengths | {"cu_seqlens_k": cu[:2]}))
    assert "max_seqlen_k: None" in refused(**call, **(lengths | {"max_seqlen_k": None}))
    assert "max_seqlen_q: 9" in refused(**call, **(lengths | {"max_seqlen_q": 9}))
    if not CUDA:  # on a GPU the values are the caller's word: reading them would stop it
        falling, long = (torch.tensor(values, dtype=torch.int32) for values in ([0, 5, 3], [0, 3, 9]))
        assert "cu_seqlens_q: [0, 5, 3]" in refused(**call, **(lengths | {"cu_seqlens_q": falling}))
        assert "cu_seqlens_k: [0, 3, 9]" in refused(**call, **(lengths | {"cu_seqlens_k": long}))
        assert "max_seqlen_q: 4 is less than" in refused(**call, **(lengths | {"max_seqlen_q": 4}))


def test_bfloat16_on_the_gpu() -> None:
    if not CUDA:
        pytest.skip("Triton's interpreter returns garbage for bfloat16 dot products")
    assert_right(Draw([(200, 333)], 4, 2, 128, torch.bfloat16, causal=True))


@pytest.mark.parametrize(("beside", "two_passes"), [(("dV",), True), (("dK",), False), (("dV", "dK"), False)], ids=str)
def test_products_issued_in_another_order_give_the_gradients(beside: tuple[str, ...], two_passes: bool) -> None:
    config = Config(Tile(32, 16, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), two_passes=two_passes, beside=beside)
    assert_right(Draw([(19, 37)], 2, 1, 16, DTYPES[0], causal=True, options={"config": config}))
