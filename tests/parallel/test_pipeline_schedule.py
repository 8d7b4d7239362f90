"""Schedules of a pipeline, checked as data: complete, without deadlock under rendezvous sends, as idle and as full as
the formulas say; and planted faults are found."""

from dataclasses import replace

import pytest

from impls.parallel.pipeline_schedule import (
    Compute,
    Exchange,
    bubble_formula,
    busiest_messages,
    faults,
    gpipe,
    in_step,
    interleaved,
    live_peaks,
    makespan,
    one_f_one_b,
    times,
)

RANKS = (2, 3, 4, 7, 8)


def every():
    for p in RANKS:
        for m in (1, 2, 3, p, 2 * p, 2 * p + 1):
            yield p, m, 1, gpipe(p, m)
            yield p, m, 1, one_f_one_b(p, m)
            if m % p == 0:
                yield from ((p, m, v, interleaved(p, m, v)) for v in (2, 3))


EVERY = list(every())


def with_actions(schedule, rank, actions):
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :]))


def test_every_schedule_can_be_run_even_if_sends_are_rendezvous():
    wrong = {(p, m, v): found for p, m, v, schedule in EVERY if (found := faults(schedule))}
    assert not wrong


def test_a_step_of_equal_stages_idles_by_the_formula():
    for p, m, v, schedule in EVERY:
        busy = sum(in_step(one) for order in schedule.orders() for one in order) / p
        assert 1 - busy / makespan(schedule, in_step) == pytest.approx(bubble_formula(p, m, v), abs=1e-12)
    assert bubble_formula(4, 1) == 3 / 4  # the naive way: one rank of four computes
    assert bubble_formula(4, 8) == 3 / 11
    assert bubble_formula(4, 8, 2) == 3 / 19


def test_live_micro_batches_are_all_under_gpipe_and_as_many_as_stages_follow_under_1f1b():
    for p in RANKS:
        for m in (1, 2, p, 3 * p):
            assert live_peaks(gpipe(p, m)) == [m] * p
            assert live_peaks(one_f_one_b(p, m)) == [min(p - rank, m) for rank in range(p)]
            if m % p == 0:
                bound = [min(2 * (p - 1 - rank) + p + 1, 2 * m) for rank in range(p)]
                assert live_peaks(interleaved(p, m, 2)) == bound


def test_1f1b_on_the_last_rank_alternates_and_on_the_first_warms_up():
    first, *_, last = one_f_one_b(3, 4).orders()
    assert "".join(one.kind[0] for one in first) == "fffbfbbb"
    assert "".join(one.kind[0] for one in last) == "fbfbfbfb"
    assert [one.micro for one in first if one.kind == "backward"] == [0, 1, 2, 3]


def test_interleaved_stages_are_those_of_the_paper():
    """Narayanan et al. 2021, figure 4, device 1: micro-batches 1 to 4 on its first chunk, then on its second."""
    order = interleaved(4, 8, 2).orders()[0]
    forwards = [(one.stage, one.micro) for one in order if one.kind == "forward"]
    assert forwards[:8] == [(0, 0), (0, 1), (0, 2), (0, 3), (4, 0), (4, 1), (4, 2), (4, 3)]
    assert [one.kind for one in order[:11]] == ["forward"] * 11
    assert order[11] == Compute("backward", 4, 0)


def test_what_the_busiest_rank_sends():
    assert busiest_messages(one_f_one_b(2, 5)) == 5  # activations or gradients
    assert busiest_messages(one_f_one_b(3, 5)) == busiest_messages(gpipe(3, 5)) == 10  # both
    assert busiest_messages(interleaved(2, 4, 2)) == 3 * 4  # three cuts: two ways out of a rank, and gradients of one


def split(schedule, rank):
    """Every message of a rank on its own, sends first: plain blocking calls."""
    for action in schedule.actions[rank]:
        if isinstance(action, Exchange):
            for message in sorted(action.messages, key=lambda message: message.sender != rank):
                yield Exchange((message,))
        else:
            yield action


def test_blocking_sends_one_at_a_time_are_a_deadlock():
    schedule = one_f_one_b(2, 4)
    alone = replace(schedule, actions=tuple(tuple(split(schedule, rank)) for rank in range(2)))
    found = faults(alone)
    assert len(found) == 2
    assert all("waits for ever" in one for one in found)


def test_a_lost_message_a_swapped_pair_and_a_wrong_rank_are_found():
    schedule = one_f_one_b(3, 4)
    actions = list(schedule.actions[1])
    at = next(i for i, action in enumerate(actions) if isinstance(action, Exchange))
    lost = faults(with_actions(schedule, 1, actions[:at] + actions[at + 1 :]))
    assert any("rank 0 sends to rank 1 other messages" in one for one in lost)
    assert any("waits for ever" in one for one in lost)

    ours = [i for i, action in enumerate(schedule.actions[0]) if isinstance(action, Exchange)][:2]
    swapped = list(schedule.actions[0])
    swapped[ours[0]], swapped[ours[1]] = swapped[ours[1]], swapped[ours[0]]
    assert any("another order" in one for one in faults(with_actions(schedule, 0, swapped)))

    moved = [Compute("forward", 2, 0) if one == Compute("forward", 1, 0) else one for one in actions]
    found = faults(with_actions(schedule, 1, moved))
    assert any("rank 1 lacks" in one for one in found)
    assert any("rank 1 has" in one for one in found)


def test_a_backward_before_its_forward_is_found():
    schedule = gpipe(2, 2)
    last = list(schedule.actions[1])
    forward, backward = last.index(Compute("forward", 1, 1)), last.index(Compute("backward", 1, 1))
    last[forward], last[backward] = last[backward], last[forward]
    found = faults(with_actions(schedule, 1, last))
    assert any("backward before forward" in one for one in found)
    assert any("waits for ever" in one for one in found)


def test_what_is_sent_before_it_is_made_is_found():
    schedule = one_f_one_b(2, 1)
    compute, exchange, *rest = schedule.actions[0]
    assert any("waits for ever" in one for one in faults(with_actions(schedule, 0, [exchange, compute, *rest])))


def test_orders_that_wait_for_one_another_are_refused():
    orders = [[Compute("backward", 0, 0), Compute("forward", 0, 0)], [Compute("forward", 1, 0)]]
    with pytest.raises(ValueError, match="wait for one another"):
        times(orders, 2, in_step)


def test_what_is_no_pipeline_is_refused():
    with pytest.raises(ValueError, match="at least 2 ranks, got 1"):
        gpipe(1, 4)
    with pytest.raises(ValueError, match="at least 1 micro-batch"):
        one_f_one_b(2, 0)
    with pytest.raises(ValueError, match="6 micro-batches do not divide over 4 ranks"):
        interleaved(4, 6, 2)
