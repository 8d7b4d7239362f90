"""The detector over CSV files, and the command behind it."""

import csv
import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from harness.errors import UsageError
from harness.regress.cli import register
from harness.regress.table import detect_table


def write(path, header, rows):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def step(n, m, size, seed=0):
    rng = np.random.default_rng(seed)
    return np.r_[np.ones(n), np.full(m, size)] * (1 + 0.003 * rng.normal(size=n + m))


@pytest.fixture
def mixed(tmp_path):
    """Two series whose rows alternate: `a` rises at its row 20, `b` (higher is better) falls at its row 12."""
    rows = []
    for i, (a, b) in enumerate(zip(step(20, 20, 1.05), step(12, 28, 0.9, seed=1), strict=True)):
        rows += [["b", "higher", b, i], ["a", "lower", a, i]]
    return write(tmp_path / "mixed.csv", ["name", "better", "time", "n"], rows)


def test_rows_of_several_groups_may_be_mixed(mixed):
    found = detect_table(mixed, "time", "name", better_col="better")
    assert [(f["group"], f["index"], f["verdict"]) for f in found] == [("b", 12, "regressed"), ("a", 20, "regressed")]
    assert found[0]["ratio"] == pytest.approx(0.9, rel=0.01)
    assert found[0]["line"] == 2 + 2 * 12
    assert found[1]["line"] == 3 + 2 * 20


def test_without_a_group_the_file_is_one_series(tmp_path):
    path = write(tmp_path / "one.csv", ["v"], [[v] for v in step(20, 10, 1.1)])
    (found,) = detect_table(path, "v")
    assert (found["group"], found["index"], found["verdict"]) == (None, 20, "regressed")
    (found,) = detect_table(path, "v", better="higher")
    assert found["verdict"] == "improved"


def test_missing_cells_are_gaps_that_keep_their_place(tmp_path):
    cells = [str(v) for v in step(20, 10, 1.1)]
    cells[4], cells[9], cells[15] = "", "NaN", "inf"
    path = write(tmp_path / "gaps.csv", ["v", "w"], [[c, 0] for c in cells])
    changed, state = detect_table(path, "v", every=True)
    assert changed["index"] == 20
    assert (state["kind"], state["verdict"], state["missing"], state["runs"]) == ("state", "regressed", 3, 27)


def test_the_result_is_json_even_from_zero_and_huge_numbers(tmp_path):
    zero = [0.0] * 15 + [2.0] * 15
    huge = [1e-308] * 15 + [1e308] * 15
    rows = [["zero", v] for v in zero] + [["huge", v] for v in huge] + [["short", 1]]
    found = detect_table(write(tmp_path / "t.csv", ["g", "v"], rows), "v", "g", every=True)
    json.loads(json.dumps(found, allow_nan=False))
    events = [f for f in found if f["kind"] == "step"]
    assert [(f["group"], f["index"], f["ratio"]) for f in events] == [("zero", 15, None), ("huge", 15, None)]
    assert all(f["reason"] for f in events)
    assert found[-1]["verdict"] == "too few runs"


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", {}, "is empty"),
        ("v\n", {}, "no rows"),
        ("v,g\n1,a\n", {"value": "w"}, "unknown column 'w'.*(did you mean|known)"),
        ("value,g\n1,a\n", {"value": "valeu"}, "did you mean value"),
        ("v,g\n1,a\n", {"group": "h"}, "unknown column 'h'"),
        ("v,g\n1,a\n2\n", {}, "line 3: 1 cells under 2"),
        ("v,g\n1,a\nfast,a\n", {}, r"line 3, column 'v': 'fast' is not a number"),
        ("v,v\n1,2\n", {}, "2 columns are called 'v'"),
        ("v,g\n1,up\n", {"better_col": "g"}, r"line 2, column 'g': must be 'lower' or 'higher', not 'up'"),
        ("v,g\n1,lower\n2,higher\n", {"better_col": "g"}, r"line 3, column 'g': 'higher', but earlier rows"),
        ("v\n1\n", {"better": "up"}, "'up'"),
        ("v,g\n1,lower\n", {"better": "lower", "better_col": "g"}, "not both"),
        ('v\n"1\n', {}, "line 2: not CSV"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, arguments, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        detect_table(path, **{"value": "v", **arguments})


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(UsageError, match=r"cannot read .*absent.csv"):
        detect_table(tmp_path / "absent.csv", "v")
    (tmp_path / "latin.csv").write_bytes(b"v\n1\n\xe9\n")
    with pytest.raises(UsageError, match=r"latin.csv: not UTF-8"):
        detect_table(tmp_path / "latin.csv", "v")


@pytest.fixture
def app():
    app = typer.Typer()
    register(app)
    app.command("other")(lambda: None)
    return app


def test_the_command_prints_a_list_of_changes(app, mixed):
    arguments = ["detect", str(mixed), "--value", "time", "--group", "name", "--better-col", "better"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0
    assert [(f["group"], f["index"]) for f in json.loads(done.stdout)] == [("b", 12), ("a", 20)]
    plain = CliRunner().invoke(app, [*arguments, "--all"])
    assert "b: regressed at row 12 (line 26): ratio 0.89" in plain.stdout
    quiet = CliRunner().invoke(app, ["detect", str(mixed), "--value", "n", "--json", "--group", "name"])
    assert quiet.exit_code == 0


@pytest.mark.parametrize("extra", [["--value", "tiem"], ["--value", "time", "--better", "up"], []])
def test_bad_use_exits_2_with_a_message(app, mixed, extra):
    done = CliRunner().invoke(app, ["detect", str(mixed), *extra])
    assert done.exit_code == 2
    assert done.stderr
    assert "Traceback" not in done.stderr


def test_known_steps_in_real_noise_are_found_and_untouched_series_left_alone(shared):
    path = shared / "noise" / "series.csv"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    alarms: dict[str, list[int]] = {}
    for one in detect_table(path, "value", "series", better_col="better"):
        if one["ratio"] is not None and abs(one["ratio"] - 1) >= 0.03:
            alarms.setdefault(one["group"], []).append(one["index"])
    with path.open(newline="") as file:
        series = {row["series"]: row for row in csv.DictReader(file)}
    untouched, steps = 0, {1.05: [], 1.1: []}
    for name, row in series.items():
        if row["injected_at"] == "":
            untouched += len(alarms.get(name, []))
        else:
            size = float(row["injected_ratio"])
            near = any(abs(at - int(row["injected_at"])) <= 3 for at in alarms.get(name, []))
            steps[round(max(size, 1 / size), 2)].append(near)
    assert untouched <= 2
    assert (sum(steps[1.05]), len(steps[1.05])) >= (66, 72)
    assert (sum(steps[1.1]), len(steps[1.1])) == (72, 72)
