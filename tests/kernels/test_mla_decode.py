"""Latent attention in its absorbed form against float64: odd widths, heads that fill no block, splits."""

import math

import pytest
import torch

import kernels.mla_decode as module
from kernels.mla_decode import Launch, launch_shape, mla_decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def oracle(q, cache, lengths, latent, scale):
    scores = torch.einsum("bhx,bcx->bhc", q.double(), cache.double().nan_to_num()) * scale
    beyond = torch.arange(cache.shape[1], device=q.device) >= lengths[:, None, None]
    weights = scores.masked_fill(beyond, -math.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhc,bcr->bhr", weights, cache[..., :latent].double().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "context", "latent", "rope", "splits"),
    [(2, 16, 70, 64, 16, None), (1, 5, 100, 48, 8, 3), (3, 33, 40, 32, 24, 2), (1, 70, 33, 128, 64, 1)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_equals_float64(batch, heads, context, latent, rope, splits, dtype, turned, assert_near, monkeypatch):
    if turned:
        monkeypatch.setattr(module, "launch_shape", lambda heads, itemsize: Launch(16, 64, 4, 2, 1, turned=True))
    q = draw(batch, heads, latent + rope, dtype=dtype)
    cache = draw(batch, context, latent + rope, dtype=dtype, seed=1)
    lengths = torch.tensor([context, 0, 7][:batch], dtype=torch.int32, device=DEVICE)
    for row, length in enumerate(lengths.tolist()):
        cache[row, length:] = math.nan
    out = mla_decode(q, cache, lengths, latent=latent, scale=0.1, splits=splits)
    assert_near(out, oracle(q, cache, lengths, latent, 0.1), units=16)


def test_wrong_arguments_are_named():
    q, cache, lengths = draw(1, 4, 40), draw(1, 8, 40), torch.ones(1, dtype=torch.int32, device=DEVICE)
    for change, name in (
        ({"latent": 40}, "latent"),
        ({"cache_BCX": draw(1, 8, 39)}, "cache"),
        ({"lengths_B": lengths.long()}, "lengths"),
        ({"q_BHX": draw(1, 40, 4).transpose(1, 2)}, "q"),
    ):
        arguments = {"q_BHX": q, "cache_BCX": cache, "lengths_B": lengths, "latent": 32, "scale": 1.0, **change}
        with pytest.raises(ValueError, match=name):
            mla_decode(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [*(launch_shape(heads, 2) for heads in (16, 32, 128)), Launch(16, 64, 4, 2, 1, turned=True)], ids=str
)
def test_nothing_spills_on_hopper(compile_for_hopper, shape):
    arguments = {
        "q_ptr": "*bf16", "cache_ptr": "*bf16", "lengths_ptr": "*i32", "out_ptr": "*fp32", "lse_ptr": "*fp32",
        "q_stride": "i32", "cache_batch_stride": "i64", "cache_stride": "i32", "heads": "i32", "splits": "i32",
        "scale_log2": "fp32", "LATENT": 512, "LATENT_PAD": 512, "ROPE": 64, "ROPE_PAD": 64, "HEADS": shape.heads,
        "TILE": shape.tile, "SPLIT": True, "EXACT": False,
        "TURNED": shape.turned, "OVERLAPPED": False,
    }  # fmt: skip
    job = {
        "kernel": "kernels.mla_decode:mla_decode_kernel",
        "arguments": arguments,
        "warps": shape.warps,
        "options": {"num_stages": shape.stages},
    }
    (report,) = compile_for_hopper([job])
    assert report["stack"] == 0, report
    assert shape.programs * report["shared"] <= 227 * 1024, report
