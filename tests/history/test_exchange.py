"""Other tools' results in, ours out: idempotent, with provenance, and nothing that the other tool would choke on."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import DamagedStore, UsageError
from harness.history import cli
from harness.history.compact import compact
from harness.history.engine import History
from harness.history.exchange import Defaults, read_foreign
from harness.history.exchange_asv import write_asv
from harness.history.exchange_out import action_benchmark, clean, junit
from harness.history.exchange_pytest import pytest_benchmark_json
from harness.history.store import Store
from harness.history.verify import verify
from harness.record import metric

Make = Callable[..., dict[str, Any]]
Write = Callable[[Path, str, list[dict[str, Any]]], Path]
SHA = "0123456789abcdef0123456789abcdef01234567"

ASV = {
    "commit_hash": SHA,
    "env_name": "virtualenv-py3.11",
    "date": 1767225600000,
    "params": {"machine": "h200", "python": "3.11"},
    "python": "3.11",
    "requirements": {"numpy": "2.1"},
    "env_vars": {},
    "result_columns": ["result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b",
                       "stats_q_25", "stats_q_75", "stats_number", "stats_repeat", "samples", "profile"],
    "results": {
        "bench.Suite.time_sort": [[0.5, None, math.nan], [["10", "20", "30"]], "v1", 1767229200000, [1, 1, 1],
                                  None, None, None, None, None, None, [[0.49, 0.5, 0.51], None, None]],
        "bench.Suite.peakmem_sort": [[1e6], [], "v1", 1767229200000],
        "fusion.norm.Norm.track_latency": [[2e-3, 1e-3], [["'rows'"], ["'baseline'", "'optimized'"]], "v1",
                                           1767229200000],
        "fusion.norm.Norm.track_inverse_speedup": [[math.nan, 0.5], [["'rows'"], ["'baseline'", "'optimized'"]], "v1"],
        "bench.track_colour": [[7.0], [], "v1"],
        "bench.Suite.time_endless": [[math.inf], [], "v1"],
    },
    "durations": {},
    "version": 2,
}  # fmt: skip


@pytest.fixture
def app() -> typer.Typer:
    made = typer.Typer(pretty_exceptions_enable=False)
    cli.register(made)
    return made


@pytest.fixture
def asv_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "asv"
    (folder / "h200").mkdir(parents=True)
    (folder / "h200" / "machine.json").write_text('{"machine": "h200", "version": 1}')
    (folder / "h200" / "01234567-env.json").write_text(json.dumps(ASV))
    (folder / "benchmarks.json").write_text(
        json.dumps(
            {
                "bench.Suite.time_sort": {"param_names": ["n"], "unit": "seconds"},
                "fusion.norm.Norm.track_latency": {"param_names": ["workload", "variant"], "unit": "seconds"},
                "fusion.norm.Norm.track_inverse_speedup": {"param_names": ["workload", "variant"], "unit": "x"},
                "version": 2,
            }
        )
    )
    return folder


def imported(app: typer.Typer, path: Path, store: Path, *more: str) -> dict[str, Any]:
    done = CliRunner().invoke(
        app, ["import", str(path), "--store", str(store), "--json", *more], catch_exceptions=False
    )
    said: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (1 if said["skipped"] else 0)
    return said


def test_asv_results_come_in_with_their_states_and_provenance(
    app: typer.Typer, asv_folder: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    said = imported(app, asv_folder, store)
    assert said["written"] == 6
    assert {item["what"].rpartition(" ")[2] for item in said["skipped"]} == {
        "bench.track_colour",
        "bench.Suite.time_endless",
    }
    records = list(Store(store).read())
    by = {(r["technique"], r["variant"], r["workload"]): r for r in records}
    sort = by["bench.Suite.time_sort", "asv", "n=10"]
    assert sort["metrics"]["latency"] == metric("latency", 0.5, 0.49, 0.51)
    assert sort["samples"] == {"values": [0.49, 0.5, 0.51], "clock": "asv", "cache": "unknown"}
    assert (sort["commit"], sort["gpu"], sort["dims"], sort["time"]) == (
        SHA,
        "h200",
        {"n": 10},
        "2026-01-01T01:00:00.000Z",
    )
    assert sort["source"]["benchmark"] == "bench.Suite.time_sort"
    assert sort["source"]["file"] == "h200/01234567-env.json"
    states = [by["bench.Suite.time_sort", "asv", f"n={n}"]["status"] for n in (10, 20, 30)]
    assert states == ["passed", "error", "skipped"]
    assert by["bench.Suite.peakmem_sort", "asv", "default"]["metrics"]["peak_memory"]["value"] == 1e6
    pair = by["norm", "optimized", "rows"]["metrics"]
    assert (pair["latency"]["value"], pair["speedup"]["value"]) == (1e-3, 2.0)
    assert verify([Store(store)]).findings == []


def test_importing_twice_adds_nothing_even_after_compaction(app: typer.Typer, asv_folder: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert imported(app, asv_folder, store, "--dry-run")["written"] == 0
    assert not store.exists()
    first = imported(app, asv_folder, store)
    again = imported(app, asv_folder, store)
    assert (again["written"], again["already"]) == (0, first["written"])
    compact(Store(store))
    assert imported(app, asv_folder, store)["written"] == 0
    more = json.loads(json.dumps(ASV))
    more["results"]["bench.Suite.time_new"] = [[1.0], [], "v1"]
    (asv_folder / "h200" / "01234567-env.json").write_text(json.dumps(more))
    assert imported(app, asv_folder, store)["written"] == 1
    assert len(list(Store(store).read())) == first["written"] + 1


def test_a_truncated_asv_file_is_named_and_the_rest_is_read(app: typer.Typer, asv_folder: Path, tmp_path: Path) -> None:
    (asv_folder / "h200" / "torn-env.json").write_text('{"commit_hash": "')
    (asv_folder / "h200" / "old-env.json").write_text(json.dumps({**ASV, "version": 1}))
    said = imported(app, asv_folder, tmp_path / "store")
    assert said["written"] == 6
    assert {"h200/torn-env.json", "h200/old-env.json"} <= {item["what"] for item in said["skipped"]}
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no results of asv"):
        read_foreign(tmp_path / "empty", "auto", Defaults())


def test_pytest_benchmark_results_come_in(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    stats = {"median": 2e-3, "rounds": 3000, "data": [1.9e-3, 2e-3, 2.1e-3] * 1000}
    benchmarks = [
        {
            "name": "test_a[1]",
            "fullname": "t.py::test_a[1]",
            "group": None,
            "param": "1",
            "params": {"n": 1},
            "stats": stats,
        },
        {
            "name": "test_b",
            "fullname": "t.py::test_b",
            "group": "g",
            "param": None,
            "params": None,
            "stats": {"median": 0},
        },
    ]
    commit = {"id": SHA, "time": "2026-01-01T00:00:00+00:00", "dirty": True, "branch": "main"}
    machine = {"node": "box", "cpu": {"brand_raw": "AMD EPYC"}}
    when = {"datetime": "2026-01-01T00:00:00+00:00", "version": "5.1.0"}
    file.write_text(json.dumps({"machine_info": machine, "commit_info": commit, "benchmarks": benchmarks, **when}))
    said = imported(app, file, tmp_path / "store")
    assert said["written"] == 1
    assert said["skipped"][0]["what"] == "t.py::test_b"
    record = next(iter(Store(tmp_path / "store").read()))
    assert (record["technique"], record["workload"], record["gpu"], record["dirty"]) == (
        "t.py::test_a",
        "1",
        "AMD EPYC",
        True,
    )
    assert len(record["samples"]["values"]) == 1000
    assert imported(app, file, tmp_path / "store")["written"] == 0
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UsageError, match="not a file of pytest-benchmark"):
        read_foreign(tmp_path / "other.json", "auto", Defaults())


def test_a_plain_table_comes_in(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(
        "technique,variant,latency [ms],peak_memory [MiB],rows,commit,status\n"
        f"norm,optimized,1.5,2,128,{SHA},\n"
        f"norm,baseline,inf,2,128,{SHA},\n"
        f"norm,liger,,,128,{SHA},oom\n"
        f"norm,other,1,2,128,{SHA},splendid\n"
    )
    said = imported(app, file, tmp_path / "store", "--gpu", "h200", "--machine", "box")
    assert [item["what"] for item in said["skipped"]] == ["t.csv:3", "t.csv:5"]
    fast, failed = Store(tmp_path / "store").read()
    assert fast["metrics"]["latency"]["value"] == pytest.approx(1.5e-3)
    assert fast["metrics"]["peak_memory"]["value"] == 2 * 1024**2
    assert (fast["dims"], fast["gpu"], fast["machine"], fast["workload"]) == ({"rows": 128}, "h200", "box", "rows=128")
    assert fast["source"] == {"format": "csv", "file": "t.csv", "line": 2}
    assert failed["status"] == "oom"
    for header, words in (("a,b", "expected a column"), ("technique,latency [fortnights]", "fortnights")):
        file.write_text(header + "\n")
        with pytest.raises(UsageError, match=words):
            read_foreign(file, "csv", Defaults())


def test_a_torn_table_loses_its_torn_rows_only_and_names_them(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    rows = ["norm,2.0,1.5,2026-01-01", "norm,x,1.5,2026-01-01", "norm,1,1.5,yesterday", "norm,1,1.5,,more", "nor"]
    file.write_text("\n".join(["technique,ranks,latency [ms],time", *rows]))
    said = imported(app, file, tmp_path / "store")
    assert [item["what"] for item in said["skipped"]] == [f"t.csv:{line}" for line in (3, 4, 5, 6)]
    (record,) = Store(tmp_path / "store").read()
    assert (record["ranks"], record["time"]) == (2, "2026-01-01T00:00:00.000Z")
    assert verify([Store(tmp_path / "store")]).findings == []
    for text, words in (('technique,latency\n"nor,1\n', "cannot be read"), ("technique,latency,latency\n", "several")):
        file.write_text(text)
        with pytest.raises(UsageError, match=words):
            read_foreign(file, "csv", Defaults())


def test_rows_without_a_time_stand_in_the_order_of_the_file(app: typer.Typer, tmp_path: Path) -> None:
    names = [f"{(7 * place) % 20:040x}" for place in range(20)]
    file = tmp_path / "t.csv"
    file.write_text("technique,commit,latency\n" + "".join(f"norm,{name},{i + 1}\n" for i, name in enumerate(names)))
    imported(app, file, tmp_path / "store")
    history = History([Store(tmp_path / "store")], threads=1)
    history.refresh()
    assert [place.commit for place in history.order.sort(names)] == names


def test_moments_of_other_zones_are_taken_to_utc(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    bench = {"name": "a", "fullname": "a", "group": "g", "params": None, "stats": {"median": 1.0}}
    commit = {"id": SHA, "time": "2026-01-01T23:00:00-08:00"}
    rest = {"machine_info": {}, "benchmarks": [bench], "datetime": "2026-01-02T08:00:00.5"}
    file.write_text(json.dumps({"commit_info": commit, **rest}))
    (record,) = read_foreign(file, "auto", Defaults()).records
    assert (record["commit_date"], record["time"]) == ("2026-01-02T07:00:00.000Z", "2026-01-02T08:00:00.500Z")


def pair(make_record: Make) -> list[dict[str, Any]]:
    fast = make_record(1, latency=1e-3, commit=SHA, stack={"python": "3.11.7 CPython"})
    fast["metrics"]["speedup"] = metric("speedup", 2.0, 1.9, 2.1)
    slow = make_record(0, variant="baseline", latency=2e-3, commit=SHA)
    bad = make_record(2, variant="liger", status="wrong", reason="error 3 > bound \x07 <b>", commit=SHA, metrics={})
    absent = make_record(3, variant="hopper", status="skipped", reason="no GPU", commit=SHA, metrics={})
    return [slow, fast, bad, absent]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_asv_reads_what_is_exported_and_so_do_we(make_record: Make, tmp_path: Path) -> None:
    records = pair(make_record)
    write_asv(records, tmp_path / "out")
    results = pytest.importorskip("asv.results")
    file = tmp_path / "out" / "h200" / "01234567-pairbench.json"
    loaded = results.Results.load(str(file), machine_name="h200")
    assert loaded.commit_hash == SHA
    title = "t.Pairbench.track_latency"
    parameters = loaded.get_result_params(title)
    shown = dict(zip(parameters[1], loaded.get_result_value(title, parameters), strict=True))
    assert shown["'optimized'"] == 1e-3
    assert shown["'liger'"] is None
    assert math.isnan(shown["'hopper'"])
    back = read_foreign(tmp_path / "out", "auto", Defaults())
    assert back.skipped == []
    values = {r["variant"]: (r["status"], {n: e["value"] for n, e in r["metrics"].items()}) for r in back.records}
    assert values["optimized"] == ("passed", {"latency": 1e-3, "speedup": 2.0})
    assert (values["liger"][0], values["hopper"][0]) == ("error", "skipped")
    assert {(r["workload"], r["dtype"], r["ranks"]) for r in back.records} == {("w", "float32", 1)}
    with pytest.raises(UsageError, match="exists already"):
        write_asv(records, tmp_path / "out")
    with pytest.raises(UsageError, match="clean commits"):
        write_asv([make_record(0, dirty=True)], tmp_path / "none")


def test_what_was_imported_with_dots_and_little_else_survives_a_way_through_asv(tmp_path: Path) -> None:
    file, folder = tmp_path / "b.json", tmp_path / "asv"
    bench = {"name": "test_x", "fullname": "tests/a.py::test_x", "params": None, "stats": {"median": 1.0}}
    file.write_text(json.dumps({"machine_info": {}, "commit_info": {"id": SHA}, "benchmarks": [bench]}))
    (record,) = read_foreign(file, "auto", Defaults()).records
    write_asv([{**record, "time": "yesterday"}], folder)
    (back,) = read_foreign(folder, "asv", Defaults()).records
    assert (back["technique"], back["metrics"]["latency"]["value"]) == ("tests/a.py::test_x", 1.0)


def test_the_direction_and_the_unit_are_github_action_benchmarks_own(make_record: Make) -> None:
    lower, higher = (action_benchmark(pair(make_record), better) for better in ("lower", "higher"))
    assert {item["unit"] for item in lower} == {"s"}
    assert [item["name"] for item in higher] == ["t w float32 optimized (h200) speedup"]
    assert higher[0]["value"] == 2.0
    assert "0.1" in higher[0]["range"]
    zero = make_record(0, metrics={"peak_memory": metric("peak_memory", 0.0)})
    assert action_benchmark([zero], "lower") == []
    with pytest.raises(UsageError, match="--better"):
        action_benchmark([], "faster")


@pytest.mark.parametrize("wrong", [3, "x", [1], True])
def test_a_file_of_another_shape_is_named_and_the_rest_is_read(asv_folder: Path, tmp_path: Path, wrong: Any) -> None:
    file = tmp_path / "b.json"
    good = {"name": "a", "fullname": "a", "group": "g", "params": None, "stats": {"median": 1.0}}
    data = {"machine_info": {}, "commit_info": {"id": SHA}, "benchmarks": [wrong, {**good, "stats": wrong}, good]}
    file.write_text(json.dumps(data))
    found = read_foreign(file, "auto", Defaults())
    assert [what for what, _ in found.skipped] == ["benchmark 1", "a"]
    assert len(found.records) == 1
    file.write_text(json.dumps({**data, "machine_info": wrong}))
    with pytest.raises(UsageError, match="not of the shape"):
        read_foreign(file, "auto", Defaults())
    whole = len(read_foreign(asv_folder, "asv", Defaults()).records)
    for number, change in enumerate(({"results": wrong}, {"params": wrong}, {"result_columns": wrong})):
        (asv_folder / f"wrong{number}.json").write_text(json.dumps({**ASV, **change}))
    read = read_foreign(asv_folder, "asv", Defaults())
    assert len(read.records) >= whole
    assert {"wrong0.json", "wrong1.json"} <= {what for what, _ in read.skipped}


def test_a_latency_of_zero_is_no_benchmark(make_record: Make) -> None:
    with pytest.raises(UsageError, match="nothing to export"):
        pytest_benchmark_json([make_record(0, latency=0.0)])


def test_junit_tells_four_states_apart(make_record: Make) -> None:
    root = ElementTree.fromstring(junit(pair(make_record)))
    assert {key: root.get(key) for key in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "errors": "0",
        "skipped": "1",
    }
    failure = root.find(".//failure")
    assert failure is not None
    assert "\N{REPLACEMENT CHARACTER} <b>" in str(failure.get("message"))
    assert clean("a\x00\ud800b") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"


def test_the_export_command(app: typer.Typer, make_record: Make, write_run: Write, tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_run(store, "r1", pair(make_record))

    def export(*args: str) -> str:
        done = CliRunner().invoke(app, ["export", *args, "--store", str(store)], catch_exceptions=False)
        assert done.exit_code == 0
        return done.stdout

    rows = list(csv.DictReader(io.StringIO(export("csv"))))
    assert [(row["variant"], row["latency [s]"]) for row in rows][:2] == [("baseline", "0.002"), ("optimized", "0.001")]
    (tmp_path / "back.csv").write_text(export("csv"))
    back = read_foreign(tmp_path / "back.csv", "csv", Defaults()).records
    assert [{n: e["value"] for n, e in r["metrics"].items()} for r in back] == [
        {"latency": 2e-3},
        {"latency": 1e-3, "speedup": 2.0},
        {},
        {},
    ]
    saved = json.loads(export("pytest-benchmark"))
    assert [item["stats"]["median"] for item in saved["benchmarks"]] == [2e-3, 1e-3]
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    assert len(read_foreign(tmp_path / "saved.json", "auto", Defaults()).records) == 2
    assert json.loads(export("github-action-benchmark"))
    export("junit", "-o", str(tmp_path / "out" / "junit.xml"))
    with pytest.raises(UsageError, match="exists already"):
        export("junit", "-o", str(tmp_path / "out" / "junit.xml"))
    export("parquet", "-o", str(tmp_path / "all.parquet"))
    import pyarrow.parquet as pq

    table = pq.read_table(tmp_path / "all.parquet")
    assert [json.loads(line) for line in table.column("line").to_pylist()] == pair(make_record)
    export("asv", "-o", str(tmp_path / "asv"))
    with pytest.raises(UsageError, match="did you mean junit"):
        export("junitt")
    with pytest.raises(UsageError, match="--output"):
        export("asv")
    with pytest.raises(UsageError, match="no record to export"):
        export("csv", "--technique", "nothing")
    (store / "h200" / "torn.jsonl").write_text("{")
    with pytest.raises(DamagedStore, match=r"torn\.jsonl"):
        export("csv")
