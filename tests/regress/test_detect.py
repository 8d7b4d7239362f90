"""The detector on series whose truth is known: what it must find, and what it must leave alone."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.errors import UsageError
from harness.regress.detect import detect
from harness.regress.made import NULLS, made
from harness.regress.series import Point


def found(report):
    return [(e.index, e.verdict) for e in report.events]


def alarms(kind, count, seed):
    rng = np.random.default_rng(seed)
    return sum(bool(detect(NULLS[kind](rng, int(rng.integers(20, 201)))).events) for _ in range(count))


@pytest.mark.parametrize("kind", NULLS)
def test_noise_alone_raises_no_alarm(kind):
    assert alarms(kind, 60, seed=1) <= 1


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", NULLS)
def test_noise_alone_raises_an_alarm_in_at_most_one_series_of_a_hundred(kind):
    assert alarms(kind, 1000, seed=2) <= 10


@pytest.mark.parametrize("direction", [1.03, 1 / 1.03])
def test_a_step_of_three_percent_is_found_with_the_third_run_after_it(direction):
    hits = 0
    for seed in range(60):
        report = detect(made([(30, 7.0), (3, 7.0 * direction)], seed=seed))
        verdict = "regressed" if direction > 1 else "improved"
        hits += [e.verdict for e in report.events] == [verdict] and abs(report.events[0].index - 30) <= 1
    assert hits >= 58


@pytest.mark.parametrize("bad", [1, 2])
def test_one_or_two_bad_runs_at_the_end_ask_for_a_rerun(bad):
    report = detect(made([(30, 1.0), (bad, 1.08)], seed=3))
    assert report.state == "inconclusive"
    assert report.suspect == 30
    assert report.events == ()
    assert "run again" in report.reason


def test_reruns_of_the_suspect_commit_settle_it():
    before = [Point((float(v),)) for v in made([(30, 1.0)], seed=3)]
    assert detect([*before, Point((1.081,))]).state == "inconclusive"
    assert found(detect([*before, Point((1.081, 1.079, 1.082))])) == [(30, "regressed")]
    assert detect([*before, Point((1.081, 1.001, 0.998))]).state == "unchanged"


def test_a_single_bad_run_inside_changes_nothing():
    report = detect(made([(20, 1.0), (1, 1.5), (20, 1.0)], seed=4))
    assert (report.state, report.events) == ("unchanged", ())


@pytest.mark.parametrize("lead", [0, 20])
@pytest.mark.parametrize("noise", [0.0, 0.002, 0.005, 0.01])
def test_a_drift_of_one_percent_a_commit_is_one_event(lead, noise):
    course = 1.01 ** np.concatenate([np.zeros(lead), np.arange(30)])
    report = detect(course * (1 + noise * np.random.default_rng(5).normal(size=len(course))))
    assert [(e.kind, e.verdict) for e in report.events] == [("drift", "regressed")]
    event = report.events[0]
    assert abs(event.index - lead) <= 4
    assert event.ratio == pytest.approx(1.01**29, rel=0.05)
    assert report.state == "regressed"


def test_a_drift_too_slow_for_steps_shows_against_the_pinned_reference():
    runs = made([(12, 100.0), (12, 100.6), (12, 101.2), (12, 101.8)], noise=0.01, seed=6)
    held = detect(runs, reference=made([(30, 98.5)], noise=0.01, seed=7)).reference
    assert held.verdict == "regressed"
    assert held.low < held.ratio < held.high
    same = detect(runs, reference=runs[-15:]).reference
    assert same.verdict == "unchanged"


def test_a_step_that_recovers_stays_an_event():
    report = detect(made([(30, 1.0), (10, 1.05), (30, 1.0)], seed=8))
    assert found(report) == [(30, "regressed"), (40, "improved")]
    assert report.events[0].recovered_at == 40
    assert report.events[1].recovers == 30
    assert report.state == "unchanged"


def test_the_loss_of_an_improvement_is_a_regression():
    report = detect(made([(30, 1.0), (20, 0.95), (20, 1.0)], seed=8))
    assert found(report) == [(30, "improved"), (50, "regressed")]
    assert report.state == "regressed"


@pytest.mark.parametrize("second", [1.03, 0.97])
def test_a_first_step_does_not_blind_the_second(second):
    report = detect(made([(30, 1.0), (30, 2.0), (30, 2.0 * second)], seed=9))
    assert [e.index for e in report.events] == [30, 60]
    assert report.events[1].ratio == pytest.approx(second, rel=0.005)


def test_many_steps_up_and_down_are_all_found():
    levels = [1.0, 1.05, 1.12, 1.08, 1.2, 1.0, 0.95]
    report = detect(made([(15, level) for level in levels], seed=10))
    assert [e.index for e in report.events] == [15, 30, 45, 60, 75, 90]


def test_a_machine_with_two_speeds_that_last_is_no_list_of_changes():
    report = detect(made([(9, 1.0), (8, 1.1)] * 5, seed=11))
    assert report.events == ()
    assert "switches between" in report.reason


def test_direction_belongs_to_the_metric():
    runs = made([(30, 1.0), (10, 1.05)], seed=12)
    assert found(detect(runs, "lower")) == [(30, "regressed")]
    assert found(detect(runs, "higher")) == [(30, "improved")]
    with pytest.raises(UsageError, match="sideways"):
        detect(runs, "sideways")


@pytest.mark.parametrize("values", [[], [1.0], [0.0] * 5, [math.nan] * 50, [math.inf, -math.inf, 1.0, 2.0, 3.0]])
def test_a_handful_of_runs_is_too_few(values):
    report = detect(values, reference=[1.0, 1.0, 1.0])
    assert report.state == "too few runs"
    assert report.missing == sum(not math.isfinite(v) for v in values)
    assert report.reference.verdict == "too few runs"


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e300, 5e-324])
def test_a_constant_series_is_unchanged(value):
    report = detect([value] * 30)
    assert (report.state, report.events) == ("unchanged", ())


@pytest.mark.parametrize("at", [1e-300, 1e-9, 1e9, 1e300])
def test_magnitude_does_not_matter(at):
    assert found(detect(at * made([(20, 1.0), (20, 1.04)], seed=13))) == [(20, "regressed")]


def test_a_count_that_never_varies_shows_a_change_at_once():
    report = detect([4096.0] * 20 + [4160.0] * 3)
    assert found(report) == [(20, "regressed")]
    assert report.events[0].ratio == 4160 / 4096


def test_from_zero_there_is_a_verdict_and_no_ratio():
    report = detect([0.0] * 15 + [3.0] * 10)
    (event,) = report.events
    assert (event.index, event.verdict, event.ratio, event.low) == (15, "regressed", None, None)
    assert "zero" in event.reason
    (event,) = detect([3.0] * 15 + [0.0] * 10).events
    assert (event.index, event.verdict, event.ratio) == (15, "improved", 0.0)


def test_below_zero_there_is_a_verdict_and_no_ratio():
    runs = -made([(20, 1.0), (20, 2.0)], seed=14)
    (event,) = detect(runs).events
    assert (event.index, event.verdict, event.ratio) == (20, "improved", None)
    assert "below zero" in event.reason


def test_missing_runs_keep_their_place_in_the_count():
    runs = made([(30, 1.0), (10, 1.05)], seed=15)
    runs[[3, 10, 20, 33]] = [math.nan, math.inf, -math.inf, math.nan]
    report = detect(runs)
    assert found(report) == [(30, "regressed")]
    assert (report.runs, report.missing) == (36, 4)


def test_a_change_lies_between_points_never_inside_one():
    runs = made([(45, 1.0), (45, 1.04)], seed=16)
    points = [Point(tuple(runs[i : i + 3])) for i in range(0, 90, 3)]
    assert found(detect(points)) == [(15, "regressed")]


def test_runs_with_wide_intervals_are_not_taken_for_quiet():
    runs = made([(20, 1.0), (4, 1.02)], noise=0.001, seed=17)
    assert found(detect(runs)) == [(20, "regressed")]
    vague = [Point((v,), (v * 0.96,), (v * 1.04,)) for v in runs]
    assert detect(vague).events == ()
    with pytest.raises(ValueError, match="2 runs has 1 values in 'low'"):
        Point((1.0, 2.0), (1.0,), (2.0, 3.0))
    with pytest.raises(ValueError, match="both"):
        Point((1.0,), (1.0,))


def test_the_smallest_change_that_a_series_can_show_is_one_that_it_shows():
    reports = [detect(made([(40, 1.0)], seed=seed)) for seed in range(40)]
    size = float(np.median([r.smallest_change for r in reports]))
    assert size < 0.03
    shown = sum(bool(detect(made([(40, 1.0), (3, 1 + size)], seed=s)).events) for s in range(100, 160))
    hidden = sum(bool(detect(made([(40, 1.0), (3, 1 + size / 2)], seed=s)).events) for s in range(100, 160))
    assert shown >= 40
    assert hidden <= 10
    assert all(r.smallest_lasting_change < r.smallest_change for r in reports)


def test_the_interval_of_a_ratio_holds_the_truth():
    inside = 0
    for seed in range(100):
        (event,) = detect(made([(30, 1.0), (15, 1.1)], noise=0.01, seed=seed)).events
        assert event.p_value < 1e-6
        inside += event.low <= 1.1 <= event.high
    assert inside >= 88


finite = st.floats(min_value=1e-6, max_value=1e6)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([0.9, 0.97, 1.0, 1.04, 1.5]), factor=finite)
def test_the_unit_changes_nothing(seed, size, factor):
    runs = made([(25, 1.0), (20, size)], seed=seed)
    plain, scaled = detect(runs), detect(runs * factor)
    assert found(plain) == found(scaled)
    assert plain.state == scaled.state
    assert [e.ratio for e in scaled.events] == pytest.approx([e.ratio for e in plain.events])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([0.9, 0.97, 1.0, 1.04, 1.5]))
def test_better_the_other_way_round_gives_the_other_verdict(seed, size):
    runs = made([(25, 1.0), (20, size)], seed=seed)
    other = {"regressed": "improved", "improved": "regressed"}
    down, up = detect(runs, "lower"), detect(runs, "higher")
    assert [(i, other[v]) for i, v in found(down)] == found(up)
    assert other.get(down.state, down.state) == up.state


@settings(max_examples=60, deadline=None)
@example([0.0, 2.0**1023 * (1 + 2**-52), 2.0**1023])  # their sum, halved for a median, is no number any more
@example([0.0, 0.0, 0.0, -6.4e307, -1.2e308, -1.2e308, -1.2e308, -1.2e308])
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=60))
def test_any_numbers_give_a_report_of_finite_figures_and_the_same_one_again(values):
    report = detect(values, reference=values)
    assert repr(report) == repr(detect(values, reference=values))
    assert report.runs + report.missing == len(values)
    for event in report.events:
        figures = (event.ratio, event.low, event.high, event.old, event.new, event.p_value)
        assert all(f is None or math.isfinite(f) for f in figures)
        assert event.ratio is not None or event.reason
        assert 0 <= event.index < len(values)
