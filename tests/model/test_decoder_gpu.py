"""The decoder on a CUDA device: the CPU's answer, and capture in a graph."""

import pytest
import torch

from impls.model.cache import KVCache
from impls.model.config import SHAPES
from impls.model.decoder import CausalAttention
from impls.model.weights import load_model

pytestmark = pytest.mark.gpu
CONFIG = SHAPES["tiny"]


@pytest.fixture(scope="module")
def cpu():
    return load_model(shape="tiny", seed=3)


@pytest.fixture(scope="module")
def cuda():
    return load_model(shape="tiny", seed=3).to("cuda")


@torch.inference_mode()
def test_cuda_gives_the_cpus_logits(cpu, cuda):
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 50), generator=torch.Generator().manual_seed(0))
    wanted = cpu(tokens)
    assert cuda.frequencies.is_cuda
    error = (cuda(tokens.cuda()).cpu() - wanted).norm() / wanted.norm()
    assert error < 1e-4


@torch.inference_mode()
def test_seeded_weights_made_on_the_device_are_the_same_again():
    first, again = (load_model(shape="tiny", seed=3, device="cuda") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


@torch.inference_mode()
def test_a_decode_step_replayed_as_a_graph_equals_the_eager_step(cuda):
    tokens = torch.randint(0, CONFIG.vocab_size, (3, 20), device="cuda")
    positions = torch.arange(12, device="cuda").expand(3, -1)
    eager, captured = (KVCache(CONFIG, rows=3, capacity=32, device="cuda") for _ in range(2))
    for cache in (eager, captured):
        cuda(tokens[:, :12], positions, cache.prefill(positions))
    token, place = tokens[:, 12:13].clone(), torch.full((3, 1), 12, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda(token, place, captured.extend(place))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = cuda(token, place, captured.extend(place))
    for step in range(12, 20):
        token.copy_(tokens[:, step : step + 1])
        place.fill_(step)
        graph.replay()
        wanted = cuda(token, place, eager.extend(place))
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_grouped_heads_writes_no_scores(dtype):
    rows, heads, kv_heads, width = 8192, 8, 2, 64
    q, k, v = (
        torch.randn(1, rows, h, width, device="cuda", dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    CausalAttention()(0, q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < heads * rows**2 * dtype.itemsize / 4
