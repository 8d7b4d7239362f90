"""Figures in README and docs come from records that count, and from nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli import make_app
from harness.commands.figures import fill
from harness.commands.inspect import _print_run
from harness.errors import UsageError
from harness.record import metric

ROOT = Path(__file__).parents[2]
PLACE = "before\n<!-- figures: technique=t -->\nold\n<!-- end figures -->\nafter\n"


def record(run: str, seconds: float, **more: Any) -> dict[str, Any]:
    plain = {"gpu": "h200", "technique": "t", "workload": "w", "variant": "optimized", "dtype": "float32"}
    place = {"run": run, "commit": run[-1] * 40, "time": run, "dirty": False, "status": "passed"}
    return {**plain, **place, "metrics": {"latency": metric("latency", seconds, seconds, seconds)}, **more}


def test_the_newest_record_of_a_clean_tree_is_shown() -> None:
    records = [record("2026a", 1e-3), record("2026b", 2e-3), record("2026c", 3e-3, dirty=True)]
    filled = fill(PLACE, records)
    assert "2 ms" in filled
    assert f"2026b at {'b' * 10} |" in filled
    assert "2026a" not in filled
    assert "2026c" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("after\n")
    assert fill(filled, records) == filled


@pytest.mark.parametrize("more", [{"dirty": True}, {"dirty": None}, {"status": "unsettled"}, {"technique": "other"}])
def test_a_place_without_a_record_that_counts_says_so(more: dict[str, Any]) -> None:
    filled = fill(PLACE, [record("2026a", 1e-3, **more)])
    assert "No record of this that passed on a clean tree" in filled
    assert "2026a" not in filled


def test_a_condition_of_no_known_form_is_named() -> None:
    with pytest.raises(UsageError, match="'gpu' is not key=value"):
        fill(PLACE.replace("technique=t", "gpu"), [])


def test_a_place_shows_the_metrics_and_counters_that_it_asks_for() -> None:
    metrics = {"latency": metric("latency", 2.0, 2.0, 2.0), "itl_p99": metric("itl_p99", 0.057)}
    metrics |= {"output_rate": metric("output_rate", 2767.0), "peak_memory": metric("peak_memory", 1024.0)}
    counters = {"allowed_speedup": 1.3905, "decode_step_s": 0.00718}
    place = PLACE.replace("technique=t", "technique=t show=output_rate,itl_p99,allowed_speedup,decode_step_s,nothing")
    filled = fill(place, [record("2026a", 1.0, metrics=metrics, counters=counters)])
    assert "| output_rate | itl_p99 | allowed_speedup | decode_step_s | nothing | run |" in filled
    assert "| 2.77 ktokens/s | 57 ms | 1.39 | 7.18 ms | – | 2026a" in filled
    assert "peak memory" not in filled
    assert fill(filled, [record("2026a", 1.0, metrics=metrics, counters=counters)]) == filled


def test_a_damaged_line_is_told_and_the_tables_are_made_of_the_rest(tmp_path: Path) -> None:
    sound = next(path for path in (ROOT / "results" / "history").glob("*/*.jsonl"))
    folder, page = tmp_path / "history" / sound.parent.name, tmp_path / "page.md"
    folder.mkdir(parents=True)
    first = sound.read_text().splitlines()[0]
    (folder / sound.name).write_text(first + "\n" + '{"half of a rec\n')
    page.write_text(PLACE)
    done = CliRunner().invoke(make_app(), ["figures", "--write", "--store", str(tmp_path / "history"), str(page)])
    assert done.exit_code == 0, done.output
    assert f"{sound.name}:2" in done.stderr
    assert "No record of this" in page.read_text()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["run", "t", "--set", "a=b c"], "asked: pairbench run t --set 'a=b c'"),
        (["asv", "t"], "asked: asv t"),
    ],
)
def test_show_prints_the_command_that_was_asked(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = {"type": "run", "run": "r1", "gpu": "h200", "machine": "m", "commit": None, "dirty": False, "time": "now"}
    _print_run([{**first, "asked": {"argv": argv}}], "r1", [])
    assert said in capsys.readouterr().out
