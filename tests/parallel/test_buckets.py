"""Buckets: filled from the end, sent in order and once, not before the last micro-batch, summed in float32."""

import pytest
import torch

from impls.parallel.buckets import Buckets, wide


class FakeLink:
    """Doubles what it is given, as if another rank had the same, and notes when each message left."""

    def __init__(self):
        self.sent = []

    def all_reduce(self, x):
        self.sent.append(x.numel())
        x.mul_(2)
        return self

    def wait(self):
        return None


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(4))).to(dtype)


def step(net, x):
    return net(x).float().square().sum()


def test_a_full_bucket_leaves_while_backward_goes_on():
    net, link = model(), FakeLink()
    buckets = Buckets(list(net.parameters()), link, capacity=2 * 16 * 4, overlap=True)
    seen = []
    net[1].register_full_backward_hook(lambda *_: seen.append(list(link.sent)))
    buckets.start()
    step(net, torch.ones(2, 4)).backward()
    assert seen == [[32]]
    buckets.finish()
    assert link.sent == [32, 32]


def test_without_overlap_nothing_leaves_before_the_end():
    net, link = model(), FakeLink()
    buckets = Buckets(list(net.parameters()), link, capacity=64, overlap=False)
    buckets.start()
    step(net, torch.ones(2, 4)).backward()
    assert link.sent == []
    buckets.finish()
    assert link.sent == [16] * 4


def test_under_accumulation_only_the_last_micro_batch_is_sent():
    net, other, link = model(), model(), FakeLink()
    buckets = Buckets(list(net.parameters()), link, capacity=1, overlap=True)
    batches = [torch.ones(1, 4), torch.full((1, 4), 2.0)]
    buckets.start()
    with buckets.no_sync():
        step(net, batches[0]).backward()
    assert link.sent == []
    step(net, batches[1]).backward()
    sums = buckets.finish()
    for x in batches:
        step(other, x).backward()
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(sums[mine], 2 * theirs.grad)


def test_a_second_step_starts_from_zero():
    net, link = model(), FakeLink()
    buckets = Buckets(list(net.parameters()), link, capacity=128, overlap=True)
    found = []
    for _ in range(2):
        buckets.start()
        step(net, torch.ones(2, 4)).backward()
        found.append([x.clone() for x in buckets.finish().values()])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_a_parameter_without_a_part_in_the_loss_sends_zero_and_not_its_last_gradient():
    net, link = model(), FakeLink()
    params = list(net.parameters())
    buckets = Buckets(params, link, capacity=1 << 20, overlap=True)
    buckets.start()
    step(net, torch.ones(2, 4)).backward()
    buckets.finish()
    buckets.start()
    step(net[:2], torch.ones(2, 4)).backward()
    sums = buckets.finish()
    assert sums[params[0]].abs().sum() > 0
    assert sums[params[3]].abs().sum() == 0


def test_sixteen_bits_are_summed_in_float32():
    net, link = model(torch.bfloat16), FakeLink()
    buckets = Buckets(list(net.parameters()), link, capacity=1 << 20, overlap=True)
    buckets.start()
    step(net, torch.ones(2, 4, dtype=torch.bfloat16)).backward()
    assert all(x.dtype == torch.float32 for x in buckets.finish().values())
    assert (wide(torch.float16), wide(torch.float64)) == (torch.float32, torch.float64)


def test_closed_buckets_leave_parameters_alone():
    net, link = model(), FakeLink()
    buckets = Buckets(list(net.parameters()), link, capacity=64, overlap=True)
    buckets.close()
    step(net, torch.ones(2, 4)).backward()
    assert all(p.grad is not None for p in net.parameters())
    assert link.sent == []


def test_a_capacity_below_one_byte_is_refused():
    with pytest.raises(ValueError, match="a capacity of at least 1 byte, got 0"):
        Buckets(list(model().parameters()), FakeLink(), capacity=0, overlap=True)
