"""Verdicts on a real commit graph: size, suspects, whose doing, and what stays visible."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import DamagedStore, UsageError
from harness.regress import cli_history, confirm
from harness.regress.acknowledge import Acknowledged, read_acknowledged
from harness.regress.attribution import reproduce
from harness.regress.reference import Reference, slow_drift
from harness.regress.report import Comparison, Event, Report
from harness.regress.verdicts import Scope, Verdict, judge, judge_within


def of(verdicts: list[Verdict], variant: str = "optimized", metric: str = "latency") -> Verdict:
    return next(v for v in verdicts if (v.key.variant, v.key.metric) == (variant, metric))


def judged(world: Any, **scope: Any) -> list[Verdict]:
    with world.history() as history:
        return judge(history, Scope(**scope))


def test_a_step_names_its_commit_its_size_and_its_side(world: Any) -> None:
    world.nights(10)
    world.nights(6, "slower", optimized=1.1e-3)
    verdict = of(judged(world))
    body = verdict.as_json()
    assert verdict.verdict == "regressed"
    assert body["commit"] == world.commits[10]
    assert body["previous"] == world.commits[9]
    assert body["subject"] == "slower 0"
    assert body["low"] <= 1.1 <= body["high"]
    assert body["side"] == "optimized"
    assert "sentinel did not move" in body["side_reason"]
    assert body["changed"]["commits"] == [{"commit": world.commits[10], "subject": "slower 0"}]
    assert body["changed"]["stack"] == {}
    assert 0 < body["smallest_change"] < 0.1
    assert body["reproduce"] == f"git checkout {world.commits[10][:12]} && pairbench run norm --workload rows"


def test_the_baseline_can_be_what_moved(world: Any) -> None:
    world.nights(10)
    world.nights(6, baseline=1.8e-3)
    verdicts = judged(world)
    assert of(verdicts, "baseline").verdict == "improved"
    speedup = of(verdicts, metric="speedup")
    assert (speedup.verdict, speedup.body["side"]) == ("regressed", "baseline")
    assert of(verdicts).verdict == "unchanged"


def test_both_sides_and_the_whole_machine_are_told_apart(world: Any) -> None:
    world.nights(10)
    world.nights(6, optimized=1.1e-3, baseline=2.2e-3)
    assert of(judged(world)).body["side"] == "both"
    world.nights(8, optimized=1.1e-3, baseline=2.2e-3, machine=1.08)
    slow = of(judged(world))
    assert slow.body["side"] == "machine"
    assert slow.body["events"][0]["side"] == "both"


def test_what_else_changed_is_listed(world: Any) -> None:
    world.nights(10)
    for number in range(3):
        world.commit(f"unmeasured {number}")
    world.nights(5, "new torch", optimized=1.1e-3, stack={"torch": "2.12.0", "triton": "3.6.0"})
    changed = of(judged(world)).body["changed"]
    subjects = [item["subject"] for item in changed["commits"]]
    assert subjects == ["unmeasured 0", "unmeasured 1", "unmeasured 2", "new torch 0"]
    assert changed["stack"] == {"torch": ["2.11.0", "2.12.0"]}
    assert changed["machine"] is None


def test_a_recovered_regression_stays_an_event(world: Any) -> None:
    world.nights(8)
    world.nights(6, optimized=1.15e-3)
    world.nights(6)
    verdict = of(judged(world))
    assert verdict.verdict == "unchanged"
    assert [event["verdict"] for event in verdict.body["events"]] == ["regressed", "improved"]
    assert verdict.body["events"][0]["recovered"] == world.commits[14]


def test_several_runs_on_one_commit_are_one_point(world: Any) -> None:
    world.nights(8)
    bad = world.commit("slower")
    for _ in range(4):
        world.run(bad, optimized=1.2e-3)
    verdict = of(judged(world))
    assert (verdict.verdict, verdict.body["commit"], verdict.body["points"]) == ("regressed", bad, 9)


def test_what_names_no_command_is_reproduced_by_no_invented_one() -> None:
    assert reproduce({"commit": "1" * 40, "standing": "graph", "reproduce": None}).startswith("#")
    assert reproduce({"commit": "1" * 40, "standing": "graph", "reproduce": "x"}) == f"git checkout {'1' * 12} && x"


def test_dirty_orphan_and_side_points_are_no_ones_baseline(world: Any) -> None:
    world.nights(9)
    for _ in range(5):
        world.run(world.commits[-1], optimized=5e-3, dirty=True)
    gone = world.commit("amended away")
    for _ in range(5):
        world.run(gone, optimized=5e-3)
    world.git("reset", "-q", "--hard", "HEAD~1")
    verdict = of(judged(world))
    assert (verdict.verdict, verdict.body["points"]) == ("unchanged", 9)


def test_one_bad_run_asks_for_another_and_confirm_makes_it(world: Any) -> None:
    world.nights(12)
    world.nights(1, "suspect", optimized=1.3e-3)
    with world.history() as history:
        doubtful = judge(history)
        verdict = of(doubtful)
        assert verdict.verdict == "inconclusive"
        assert verdict.body["suspect"]["commit"] == world.commits[-1]
        asked: list[list[str]] = []

        def run(command: Any) -> int:
            asked.append(list(command)[1:])
            for _ in range(3):
                world.run(world.commits[-1], optimized=1.3e-3)
            return 0

        notes = confirm.confirm(history, doubtful, str(world.store), run)
        wanted = ["--variant", "baseline", "--variant", "optimized", "--device", "cuda", "--store", str(world.store)]
        assert asked == [["-m", "harness", "run", "norm", "--workload", "rows", *wanted]]
        assert "exit code 0" in notes[0]
        history.refresh()
        assert of(judge(history)).verdict == "regressed"
        assert confirm.confirm(history, judge(history), None, run) == ["nothing is in doubt: no run was made"]


def test_confirm_measures_only_what_is_checked_out(world: Any) -> None:
    world.nights(12)
    world.nights(1, optimized=1.3e-3)
    world.git("checkout", "-q", world.commits[3])
    with world.history() as history:
        notes = confirm.confirm(history, judge(history), None, lambda command: pytest.fail("nothing may run"))
    assert "not what is checked out" in notes[0]
    assert f"git checkout {world.commits[-1][:12]}" in notes[0]


def test_a_small_gain_does_not_make_a_large_loss_good(world: Any) -> None:
    world.nights(10)
    world.nights(10, optimized=1.3e-3)
    world.nights(10, optimized=1.24e-3)
    verdict = of(judged(world))
    assert verdict.verdict == "improved"
    assert verdict.still_regressed
    assert not of(judged(world, since=world.commits[15])).still_regressed
    with world.history() as history:
        accepted = [Acknowledged((("technique", "norm"),), world.commits[10], "right")]
        assert not of(judge(history, None, accepted)).still_regressed


def test_since_leaves_older_changes_out_of_the_verdict(world: Any) -> None:
    world.nights(10)
    world.nights(8, optimized=1.1e-3)
    assert of(judged(world, since=world.commits[10])).verdict == "regressed"
    late = of(judged(world, since=world.commits[12]))
    assert (late.verdict, late.body["commit"], len(late.body["events"])) == ("unchanged", None, 1)


@pytest.mark.parametrize(
    ("since", "code"),
    [("20260101", 1), ("2026-01-01", 1), ("2026-01-01T01:00+02:00", 1), ("20260102", 0), ("2026-01-01T00:00-02:00", 0)],
)
def test_since_takes_any_iso_date_and_zone(
    world: Any, app: typer.Typer, in_world: Callable[[], None], since: str, code: int
) -> None:
    world.nights(10)
    world.nights(4, optimized=1.1e-3)  # all at 2026-01-01T00:00:00Z
    in_world()
    args = ["regressions", "--store", str(world.store), "--fail-on", "regressed", "--since", since]
    assert CliRunner().invoke(app, args).exit_code == code


def test_verdicts_are_kept_until_their_records_change(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.nights(10)
    first = judged(world)
    from harness.regress import verdicts as module

    with monkeypatch.context() as patch:
        patch.setattr(module, "detect", lambda *args: pytest.fail("judged again"))
        assert [v.as_json() for v in judged(world)] == [v.as_json() for v in first]
        with world.history() as history:
            assert judge_within(0.0, history)[1] == 0
    world.nights(1)
    with world.history() as history:
        assert judge_within(0.0, history) == ([], 1)
        assert len(judge(history)) == len(first)


def test_an_acknowledged_change_stays_visible_with_its_reason(world: Any) -> None:
    world.nights(10)
    world.nights(6, optimized=1.1e-3)
    entry = Acknowledged((("technique", "no*"), ("metric", "latency")), world.commits[10][:8], "right at last")
    other = Acknowledged((("technique", "other"),), world.commits[10][:8], "not this one")
    with world.history() as history:
        verdicts = judge(history, None, [other, entry])
    accepted = of(verdicts)
    assert (accepted.verdict, accepted.acknowledged) == ("regressed", "right at last")
    assert of(verdicts, metric="speedup").acknowledged is None


def test_accepting_the_last_step_accepts_no_earlier_one(world: Any) -> None:
    world.nights(10)
    world.nights(10, optimized=1.1e-3)
    world.nights(6, optimized=1.2e-3)
    last, first = (Acknowledged((("technique", "norm"),), world.commits[n], "right") for n in (20, 10))
    with world.history() as history:
        only = of(judge(history, None, [last]))
        assert (only.verdict, only.acknowledged) == ("regressed", None)
        assert f"the change at {world.commits[10][:12]} is not" in only.body["reason"]
        assert of(judge(history, None, [last, first])).acknowledged == "right"
        assert of(judge(history, Scope(since=world.commits[15]), [last])).acknowledged == "right"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[acknowledged]]\ntechnique = 'a'\ncommit = '1234567'\n", "lacks 'reason'"),
        ("[[acknowledged]]\ntechnique = 'a'\ncommit = '1234567'\nreason = ' '\n", "not empty"),
        ("[[acknowledged]]\ntechnique = 'a'\ncommit = '12'\nreason = 'r'\n", "too short"),
        ("[[acknowledged]]\ntechnik = 'a'\ncommit = '1234567'\nreason = 'r'\n", "did you mean technique"),
        ("acknowledged = 3\n", "expected"),
        ("= no toml", "not TOML"),
    ],
)
def test_a_bad_acknowledgement_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "acknowledged.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="acknowledged") as found:
        read_acknowledged(path)
    assert words in str(found.value)
    assert read_acknowledged(tmp_path / "none.toml") == []


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)
    cli_history.register(made)
    return made


def test_the_command_prints_fails_and_filters(world: Any, app: typer.Typer, in_world: Callable[[], None]) -> None:
    world.nights(10)
    world.nights(6, "a | <b>bold</b> `subject`", optimized=1.1e-3)
    in_world()
    store = ["--store", str(world.store)]
    invoke = CliRunner().invoke
    done = invoke(app, ["regressions", *store, "--json"])
    assert done.exit_code == 0
    rows = json.loads(done.stdout)
    assert {row["verdict"] for row in rows} == {"regressed", "unchanged"}
    assert {(row["technique"], row["metric"]) for row in rows if row["verdict"] == "regressed"} == {
        ("norm", "latency"),
        ("norm", "speedup"),
    }
    assert invoke(app, ["regressions", *store, "--fail-on", "regressed"]).exit_code == 1
    assert invoke(app, ["regressions", *store, "--fail-on", "inconclusive"]).exit_code == 0
    assert invoke(app, ["regressions", *store, "--fail-on", "regressed", "--metric", "peak_memory"]).exit_code == 0
    table = invoke(app, ["regressions", *store])
    assert "a | <b>bold</b>" in " ".join(table.stdout.split())
    assert "git checkout" in table.stdout
    text = invoke(app, ["regressions", *store, "--markdown"]).stdout
    assert "\\<b\\>bold\\</b\\>" in text
    with pytest.raises(UsageError, match="did you mean"):
        invoke(app, ["regressions", *store, "--technique", "norn"], catch_exceptions=False)
    with pytest.raises(UsageError, match="verdict to fail on"):
        invoke(app, ["regressions", *store, "--fail-on", "worse"], catch_exceptions=False)
    (world.root / "acknowledged.toml").write_text(
        f'[[acknowledged]]\ntechnique = "norm"\ncommit = "{world.commits[10]}"\nreason = "agreed"\n'
    )
    done = invoke(app, ["regressions", *store, "--fail-on", "regressed"])
    assert done.exit_code == 0
    assert "agreed" in done.stdout


def test_a_file_of_accepted_changes_that_is_named_must_be_there(
    world: Any, app: typer.Typer, in_world: Callable[[], None]
) -> None:
    world.nights(1)
    in_world()
    done = CliRunner().invoke(app, ["regressions", "--store", str(world.store), "--acknowledged", "none.toml"])
    assert isinstance(done.exception, UsageError)
    assert "no such file" in str(done.exception)


def test_damage_is_reported_after_the_verdicts(world: Any, app: typer.Typer, in_world: Callable[[], None]) -> None:
    world.nights(3)
    in_world()
    (world.store / "h200" / "torn.jsonl").write_text('{"schema"')
    done = CliRunner().invoke(app, ["regressions", "--store", str(world.store), "--all"])
    assert "too few runs" in done.stdout
    assert isinstance(done.exception, DamagedStore)
    assert "torn.jsonl:1" in str(done.exception)
    for command in (["regressions", "--technique", "gone"], ["compare", "gone", "HEAD"], ["bisect", "gone"]):
        done = CliRunner().invoke(app, [*command, "--store", str(world.store)])
        assert isinstance(done.exception, UsageError)
        assert "torn.jsonl:1" in str(done.exception), "what was not found may be in what could not be read"


def test_an_empty_history_says_what_to_do(world: Any, app: typer.Typer, in_world: Callable[[], None]) -> None:
    world.commit("only")
    in_world()
    done = CliRunner().invoke(app, ["regressions", "--store", str(world.store)])
    assert done.exit_code == 0
    assert "pairbench run" in done.stdout


def test_dirty_records_alone_say_why_there_is_no_verdict(
    world: Any, app: typer.Typer, in_world: Callable[[], None]
) -> None:
    world.run(world.commit("only"), dirty=True)
    in_world()
    done = CliRunner().invoke(app, ["regressions", "--store", str(world.store)])
    assert "2 record(s), and none to judge" in done.stdout


def test_a_drift_that_no_window_shows_is_held_against_a_pinned_reference(world: Any) -> None:
    for number in range(60):
        world.run(world.commit(f"c{number}"), optimized=1e-3 * 1.0003**number)
    world.git("tag", "v1", world.commits[20])
    with world.history() as history:
        verdict = of(judge(history))
        held = of(judge(history, Scope(reference=world.commits[20])))
    assert verdict.verdict == "regressed"
    assert verdict.last_event is not None
    assert verdict.last_event["kind"] == "drift"
    assert held.body["reference"]["commit"] == world.commits[20]
    assert held.body["reference"]["ratio"] > 1.003


def test_a_steady_series_agrees_with_its_reference(world: Any) -> None:
    world.nights(40)
    verdict = of(judged(world))
    assert verdict.verdict == "unchanged"
    assert verdict.body["reference"]["verdict"] == "unchanged"


def test_the_slow_drift_rule_alone() -> None:
    held = Comparison("regressed", 1.03, 1.02, 1.04, 1.0, 1.03, 1e-6)
    reference = Reference(10, (1.0,) * 10)
    report = Report("unchanged", "", (), 60, 0, reference=held)
    event = slow_drift(report, reference, 60)
    assert event is not None
    assert (event.index, event.end, event.verdict, event.ratio) == (10, 59, "regressed", 1.03)
    step = Event(30, 30, "step", "regressed", 1.03, 1.02, 1.04, 1.0, 1.03, 1e-6)
    assert slow_drift(replace(report, events=(step,)), reference, 60) is None  # the step tells it all
    back = replace(step, recovered_at=40)
    assert slow_drift(replace(report, events=(back,)), reference, 60) is not None
    assert slow_drift(replace(report, state="inconclusive"), reference, 60) is None
    assert slow_drift(report, None, 60) is None


def test_commits_that_are_not_judged_are_counted_aloud(
    world: Any, app: typer.Typer, in_world: Callable[[], None]
) -> None:
    world.nights(2)
    world.run(world.commit("rebased away"))
    world.git("reset", "-q", "--hard", "HEAD~1")
    in_world()
    done = CliRunner().invoke(app, ["regressions", "--store", str(world.store)])
    assert "1 on no branch" in done.stderr
