"""The counts that the parallel pairs declare: bytes by formula at 2 and 8 ranks, FLOPs, what cannot run and why."""

import importlib

import pytest

from harness.discover import find, workloads_of
from harness.metrics import BUS_FACTORS
from harness.workload import parse_workload
from impls.parallel import collectives, context_parallel, tensor_parallel
from impls.parallel.shared import hidden_share, own_part, ring_bytes, split_sizes, train_flops

TECHNIQUES = (
    "collectives", "data_parallel", "tensor_parallel", "tp_decode", "context_parallel", "overlap", "zero",
    "expert_parallel",
)  # fmt: skip
MODEL = {"layers": 3, "width": 64, "ffn": 176, "heads": 8, "kv_heads": 8, "vocab": 256, "batch": 2, "seq": 32}


def workload(technique, dtype="float32", **dims):
    return parse_workload(technique, {"name": "w", "tier": "smoke", "dtype": dtype, **dims}, "test")


@pytest.mark.parametrize(("ranks", "share"), [(2, 1), (8, 1.75)])
def test_a_ring_all_reduce_sends_twice_n_minus_one_over_n(ranks, share):
    one = workload("collectives", op="all_reduce", payload=1 << 20, pieces=4, ranks=ranks)
    assert collectives.work(one).link_bytes == share * (1 << 20)
    other = workload("collectives", op="all_gather", payload=1 << 20, pieces=4, ranks=ranks)
    assert collectives.work(other).link_bytes == share / 2 * (1 << 20)
    sent = workload("collectives", op="send_recv", payload=1 << 20, pieces=4, ranks=ranks)
    assert collectives.work(sent).link_bytes == 1 << 20


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("variant", "units", "ends"), [("optimized", 8, 4), ("sequence_parallel", 10, 5)])
def test_a_layer_of_tensor_parallelism_costs_the_units_of_the_paper(ranks, variant, units, ends):
    w = workload("tensor_parallel", ranks=ranks, **MODEL)
    unit = (ranks - 1) / ranks * 2 * 32 * 64 * 4
    loss = 2 * (ranks - 1) / ranks * 3 * 2 * 32 * 4
    norms = 2 * (ranks - 1) / ranks * 7 * 64 * 4 if variant == "sequence_parallel" else 0
    assert tensor_parallel.link_bytes(w, variant) == pytest.approx(3 * units * unit + ends * unit + loss + norms)


def test_the_fast_way_of_tensor_parallelism_sends_less_than_the_plain_one():
    w = workload("tensor_parallel", ranks=2, **MODEL)
    assert tensor_parallel.link_bytes(w, "optimized") < tensor_parallel.link_bytes(w, "baseline") / 2


@pytest.mark.parametrize(
    ("technique", "dims", "messages", "collective"),
    [
        ("collectives", {"op": "all_to_all", "payload": 1 << 20, "pieces": 4}, 1, "all_to_all"),
        ("data_parallel", {}, 1, "all_reduce"),
        ("tensor_parallel", {}, 4 * 3 + 2, "all_reduce"),
        ("tp_decode", {"context": 8}, 2 * 3 + 1, "all_reduce"),
        ("context_parallel", {}, 3 * 7 * 3 + 1, "send_recv"),
        ("overlap", {"tokens": 8, "inner": 8, "width": 8}, 1, "all_reduce"),
    ],
)
def test_messages_are_those_that_wait_for_one_another(technique, dims, messages, collective):
    pair = importlib.import_module(f"impls.parallel.{technique}").PAIR
    work = pair.work(workload(technique, ranks=8, **{**MODEL, **dims}))
    assert (work.messages, work.collective) == (messages, collective)


def test_unknown_variants_have_no_count():
    for module in (tensor_parallel, context_parallel):
        with pytest.raises(ValueError, match="not counted here"):
            module.link_bytes(workload(module.PAIR.name, ranks=2, **MODEL), "other")


def test_flops_are_six_a_weight_and_token_and_causal_attention():
    w = workload("data_parallel", ranks=2, **MODEL)
    layer = 4 * 64 * 64 + 3 * 64 * 176
    attention = 3 * 3 * 2 * (2 * 2 * 32 * 32 * 64) / 2
    assert train_flops(w) == 6 * (3 * layer + 64 * 256) * 64 + attention


def test_what_is_hidden_is_what_a_step_does_not_wait_for():
    assert hidden_share(0.25, 1.0) == 0.75
    assert hidden_share(0.0, 1.0) == 1.0
    assert hidden_share(2.0, 1.0) == 0.0
    assert hidden_share(0.0, 0.0) == 0.0


def test_data_parallelism_is_measured_on_short_and_on_long_sequences():
    by_name = {w.name: w for w in workloads_of(find("data_parallel"))}
    for short, long in (("short", "long"), ("short8", "long8")):
        assert by_name[long].seq >= 8 * by_name[short].seq
        assert {**by_name[long].dims, "seq": 0} == {**by_name[short].dims, "seq": 0}


def test_parts_differ_by_one_at_most_and_cover_everything():
    import torch

    assert split_sizes(11, 4) == [3, 3, 3, 2]
    assert split_sizes(2, 4) == [1, 1, 0, 0]
    x = torch.arange(11)
    assert torch.equal(torch.cat([own_part(x, 0, rank, 4) for rank in range(4)]), x)
    assert ring_bytes(3, 9) == 6


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_smoke_tier_fits_two_cores(name):
    smoke = [w for w in workloads_of(find(name)) if w.tier == "smoke"]
    assert smoke
    assert all(w.ranks == 2 for w in smoke)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_every_workload_can_be_counted_and_is_supported_by_some_fast_way(name):
    pair = importlib.import_module(f"impls.parallel.{name}").PAIR
    for w in workloads_of(find(name)):
        work = pair.work(w)
        assert work.link_bytes > 0
        assert work.items > 0
        assert work.collective in BUS_FACTORS
        supports = pair.variant("optimized").supports
        assert supports is None or supports(w) is None


@pytest.mark.parametrize(
    ("technique", "variant", "dims", "words"),
    [
        ("tensor_parallel", "sequence_parallel", {**MODEL, "batch": 1, "seq": 31}, "31 tokens do not divide"),
        ("tensor_parallel", "dtensor", {**MODEL, "vocab": 257}, "the vocabulary of 257 does not divide"),
        ("context_parallel", "optimized", {**MODEL, "seq": 30}, "30 positions do not divide into 4 chunks"),
        ("context_parallel", "ulysses", {**MODEL, "kv_heads": 1}, "1 key-value heads do not divide"),
        ("overlap", "async_tp", {"tokens": 5, "inner": 8, "width": 8, "chunks": 1}, "5 tokens do not divide"),
    ],
)
def test_what_a_strategy_cannot_cut_is_said(technique, variant, dims, words):
    pair = importlib.import_module(f"impls.parallel.{technique}").PAIR
    reason = pair.variant(variant).supports(workload(technique, ranks=2, **dims))
    assert reason is not None
    assert words in reason
