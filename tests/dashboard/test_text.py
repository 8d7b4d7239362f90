"""Escaping, colours, and what is worked out before it is drawn."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dashboard import text, theme
from dashboard.charts import heatmap
from dashboard.claims import claim_rows
from dashboard.slo import goodput, pareto, share_within

ROOT = Path(__file__).resolve().parents[2]


def test_a_spreadsheet_runs_no_cell() -> None:
    made = text.to_csv([{"subject": "=cmd|' /C calc'!A0", "value": -1.5, "gap": None}])
    row = next(csv.DictReader(io.StringIO(made)))
    assert row == {"subject": "'=cmd|' /C calc'!A0", "value": "-1.5", "gap": ""}


def test_a_hover_box_shows_tags_and_quotes_as_text() -> None:
    assert text.hover("<b>x</b>", None, 'a "q"') == "&lt;b&gt;x&lt;/b&gt;<br>a &quot;q&quot;"
    assert len(text.cut("x" * 500)) == text.LONGEST


@pytest.mark.parametrize(("seconds", "words"), [(5, "a moment"), (7200, "2 hours"), (86400, "1 day")])
def test_a_span_of_time_is_said_as_a_person_says_it(seconds: float, words: str) -> None:
    assert text.ago(seconds) == words


def test_every_state_has_a_shape_and_a_sign_of_its_own() -> None:
    for looks in (theme.LOOKS, theme.VERDICTS):
        assert len({look.symbol for look in looks.values()}) == len(looks)
        assert len({look.sign for look in looks.values()}) == len(looks)
    assert {theme.look(status).title for status in ("error", "oom", "timeout", "implausible")} == {"failed"}
    assert theme.look(None).title == "not run"


def _contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("speedup", [0.1, 0.25, 0.5, 0.8, 1.0, 1.2, 2.0, 3.0, 4.0, 40.0])
def test_a_number_can_be_read_on_its_cell(speedup: float) -> None:
    colour = theme.speed_colour(speedup)
    assert _contrast(colour, theme.on_colour(colour)) >= 4.5


@pytest.mark.parametrize("speedup", [0.25, 0.5, 0.8, 1.3, 2.0, 4.0])
def test_a_sign_can_be_seen_on_its_cell(speedup: float) -> None:
    entry = {"value": speedup, "low": speedup, "high": speedup, "workloads": 1}
    row = {"technique": "t", "gpu": "g", "status": "skipped", "statuses": {}, "stale": True, "behind": 1, "time": None,
           "commit": None, "speedup": entry, "speedup_peer": None}  # fmt: skip
    cell = heatmap.coverage([row], "speedup", {})["rows"][0]["cells"][0]
    for _, colour in (cell["sign"], cell["stale"]):
        assert _contrast(cell["colour"], colour) >= 4.5


def test_a_share_is_read_between_quantiles() -> None:
    grid = [[0.0, 1.0], [0.5, 2.0], [1.0, 4.0]]
    assert share_within(grid, 0.5) == 0.0
    assert share_within(grid, 1.5) == pytest.approx(0.25)
    assert share_within(grid, 3.0) == pytest.approx(0.75)
    assert share_within(grid, 9.0) == 1.0
    assert share_within([], 1.0) is None


def test_goodput_under_two_bounds_lies_between_the_frechet_bounds() -> None:
    grid = [[0.0, 0.0], [1.0, 1.0]]
    serve = {"ttft": grid, "tpot": grid, "span": 10.0, "requests": {"finished": 50, "failed": 50}}
    found = goodput(serve, 0.8, 0.7)
    assert found is not None
    assert (found.low, found.high) == (pytest.approx(2.5), pytest.approx(3.5))
    assert goodput({"ttft": grid}, 1.0, 1.0) is None


def test_the_pareto_front_holds_what_nothing_beats() -> None:
    points = [(1.0, 1.0), (2.0, 2.0), (2.0, 3.0), (0.5, 2.0), (3.0, 5.0)]
    assert pareto(points) == [0, 1, 4]


def _record(variant: str, latency: float, memory: float, **more: Any) -> dict[str, Any]:
    return {
        "variant": variant, "status": "passed", "workload_id": "w", "dtype": "float32", "ranks": 1,
        "m_latency": latency, "m_latency_low": None, "m_latency_high": None, "m_throughput": None,
        "m_peak_memory": memory, "m_speedup": None, "counters": None,
    } | more  # fmt: skip


def test_a_promise_is_kept_only_when_the_whole_interval_is_on_its_side() -> None:
    speed = {"m_speedup": 2.0, "m_speedup_low": 1.9, "m_speedup_high": 2.1}
    rows = [_record("baseline", 2.0, 8.0), _record("optimized", 1.0, 16.0, **speed)]
    found = {row["what"]: row for row in claim_rows(rows, {"latency": "lower", "memory": "lower"})}
    assert found["latency"]["kept"] == "● kept"
    assert found["latency"]["ratio"] == pytest.approx(0.5)
    assert found["latency"]["low"] == pytest.approx(1 / 2.1)
    assert found["memory"]["kept"] == "✖ not kept: higher"
    assert found["communication"]["measured"] == "not measured"
    wide = [rows[0], _record("optimized", 1.0, 8.0, m_speedup=1.1, m_speedup_low=0.9, m_speedup_high=1.3)]
    assert claim_rows(wide, {"latency": "lower"})[0]["kept"] == "◇ no clear move"


HALF = "0.5 × the baseline's [0.5, 0.5]; "


@pytest.mark.parametrize(
    ("memory", "kept", "words"),
    [
        ([(8.0, 0.0), (4.0, 0.0)], "● kept", "none, where the baseline takes some"),
        ([(8.0, 0.0), (8.0, 4.0)], "● kept", HALF + "none, where the baseline takes some (1 of 2)"),
        ([(0.0, 0.0)], "◇ no clear move", "1 × the baseline's [1, 1]"),
        ([(0.0, 8.0)], "✖ not kept: higher", "some, where the baseline takes none"),
        ([(0.0, 8.0), (8.0, 4.0)], "◇ no clear move", HALF + "some, where the baseline takes none (1 of 2)"),
    ],
)  # fmt: skip
def test_a_memory_of_nothing_is_measured(memory: list[tuple[float, float]], kept: str, words: str) -> None:
    rows = [
        _record(variant, 1.0, took[at], workload_id=str(n))
        for n, took in enumerate(memory)
        for at, variant in enumerate(("baseline", "optimized"))
    ]
    found = next(row for row in claim_rows(rows, {"memory": "lower"}) if row["what"] == "memory")
    assert (found["kept"], found["measured"], found["workloads"]) == (kept, words, len(memory))


def test_a_failed_variant_keeps_no_promise() -> None:
    rows = [_record("baseline", 2.0, 8.0), _record("optimized", 1.0, 1.0, status="wrong")]
    assert claim_rows(rows, {"latency": "lower"})[0]["kept"] == "– not measured"
    shaky = [{**row, "status": "unsettled"} for row in rows]
    found = {row["what"]: row for row in claim_rows(shaky, {"latency": "lower"})}
    assert found["latency"]["kept"] == "◇ unsettled"
    assert found["communication"]["measured"] == "not measured", "what nobody claims waits for no quiet machine"


def test_the_dashboard_imports_no_torch() -> None:
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "dashboard").rglob("*.py"))]
    # The script draws when it is run, and packages have nothing of their own.
    names = [".".join(path.with_suffix("").parts) for path in files if path.name not in ("app.py", "__init__.py")]
    code = f"import sys; [__import__(name) for name in {names}]; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
