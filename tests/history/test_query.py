"""The questions of a dashboard: over JSONL and Parquet alike, following the store as it grows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UsageError
from harness.history import query
from harness.history.compact import compact
from harness.history.engine import History
from harness.history.flat import columns
from harness.history.generate import Shape, generate
from harness.history.index import store_state
from harness.history.order import Place
from harness.history.query import SeriesKey
from harness.history.store import Store
from harness.record import metric
from harness.regress.verdicts import judge

Make = Callable[..., dict[str, Any]]
Write = Callable[[Path, str, list[dict[str, Any]]], Path]


def opened(*roots: Path) -> History:
    history = History([Store(root) for root in roots], threads=1)
    history.refresh()
    return history


def key_of(record: dict[str, Any], name: str = "latency") -> SeriesKey:
    row = {**record, "clock": "events", "cache": "cold"}
    return SeriesKey.of(row, name)


def test_an_empty_store_has_answers_too(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        assert query.overview(history) == []
        assert query.runs(history) == []
        assert query.facets(history)["technique"] == []
        assert query.series_list(history) == []
        assert query.gpus(history) == []
        assert history.damage == []


def test_the_same_answers_from_jsonl_from_parquet_and_from_both(tmp_path: Path) -> None:
    root = tmp_path / "store"
    generate(Store(root), Shape(records=700, techniques=2, gpus=2), parquet=False)

    def answers() -> list[Any]:
        with opened(root) as history:
            keys = query.series_list(history)
            points = query.series(history, SeriesKey.of(keys[0], "latency"))
            run = query.runs(history)[-1]["run"]
            overview = query.overview(history)
            records = query.run_records(history, run)
            return [keys, points, query.runs(history), overview, records, query.failures(history)]

    plain = answers()
    assert len(plain[0]) > 10
    assert len(plain[1]) > 3
    half = sorted(root.rglob("*.jsonl"))[::2]
    aside = [(path, path.read_bytes()) for path in half]
    for path in half:
        path.unlink()
    compact(Store(root))
    for path, content in aside:
        path.write_bytes(content)
    assert answers() == plain  # both
    compact(Store(root))
    assert list(root.rglob("*.jsonl")) == []
    assert answers() == plain  # Parquet alone


def test_new_records_appear_without_a_restart(tmp_path: Path, make_record: Make) -> None:
    store = Store(tmp_path)
    with store.open_run("h200", "r1") as run, opened(tmp_path) as history:
        assert query.runs(history) == []
        states = {history.state(), store_state(tmp_path)}
        for number in range(3):
            run.append(make_record(number, run="r1"))
            assert history.state() not in states
            states.add(history.state())
            assert history.refresh()
            assert query.runs(history)[0]["records"] == number + 1
        assert not history.refresh()
        other = store.open_run("h200", "r2")
        other.append(make_record(0, run="r2"))
        other.close()
        history.refresh()
        assert [row["run"] for row in query.runs(history)] == ["r1", "r2"]
        compact(store)  # r2 moves, r1 is being written
        history.refresh()
        assert sorted(row["run"] for row in query.runs(history)) == ["r1", "r2"]
        assert query.record(history, "r1-2")["id"] == "r1-2"
        assert query.record(history, "r2-0")["id"] == "r2-0"


def test_an_index_of_many_changes_is_merged(
    tmp_path: Path, make_record: Make, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.history import index

    monkeypatch.setattr(index, "MAX_SEGMENTS", 2)
    growing = Store(tmp_path).open_run("h200", "grow")
    with opened(tmp_path) as history:
        for number in range(6):
            growing.append(make_record(number, run="grow"))
            write_run(tmp_path, f"r{number}", [make_record(0, run=f"r{number}")])
            history.refresh()
            found = sorted(row["id"] for row in query.latest(history)) and history.rows("SELECT id FROM records")
            assert len(found) == 2 * (number + 1)
        assert len(history._indexes[0].refresh().segments) <= 4
    growing.close()


def test_a_record_in_two_stores_counts_once(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    for name in ("a", "b"):
        write_run(tmp_path / name, "r1", [make_record(0)])
    for _ in range(2):  # the second time from the kept answer
        with opened(tmp_path / "a", tmp_path / "b") as history:
            assert history.duplicates == 1
            assert len(history.rows("SELECT id FROM records")) == 1


def test_damage_is_known_to_the_reader_of_an_index(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    path = write_run(tmp_path, "r1", [make_record(0)])
    with path.open("a") as file:
        file.write('torn\n{"schema": 9, "id": "x"}\n')
    (tmp_path / "stray.txt").write_text("")
    for _ in range(2):
        with opened(tmp_path) as history:
            assert len(history.rows("SELECT id FROM records")) == 1
            assert sorted((Path(d.file).name, d.line) for d in history.damage) == [
                ("r1.jsonl", 2),
                ("r1.jsonl", 3),
                ("stray.txt", 0),
            ]


def test_runs_on_one_commit_are_samples_of_one_point(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    for number, latency in enumerate((1.0e-3, 1.2e-3, 1.1e-3)):
        write_run(tmp_path, f"r{number}", [make_record(0, run=f"r{number}", latency=latency)])
    write_run(tmp_path, "dirty", [make_record(0, run="dirty", latency=9e-3, dirty=True)])
    write_run(tmp_path, "bad", [make_record(0, run="bad", status="unsettled", latency=5e-3)])
    with opened(tmp_path) as history:
        clean, dirty = query.series(history, key_of(make_record(0)))
        assert (clean["n"], clean["value"], clean["dirty"], clean["judged"]) == (3, 1.1e-3, False, True)
        assert sorted(clean["values"]) == [1.0e-3, 1.1e-3, 1.2e-3]
        assert clean["low"] == pytest.approx(0.99e-3)
        assert clean["high"] == pytest.approx(1.212e-3)
        assert (dirty["n"], dirty["dirty"], dirty["judged"]) == (1, True, False)
        newest = query.latest(history, technique="t")
        assert len(newest) == 1
        assert newest[0]["dirty"] is False
        assert newest[0]["dims"] == {"rows": 4}


def test_the_overview_tells_states_apart(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    def pair(technique: str, run: str, commit: str, date: str, **more: Any) -> list[dict[str, Any]]:
        record = make_record(1, run=f"{run}", technique=technique, commit=commit, commit_date=date, **more)
        record["id"] = f"{run}-{technique}"
        if record["status"] == "passed":
            record["metrics"]["speedup"] = metric("speedup", 2.0, 1.9, 2.1)
        else:
            record["metrics"] = {}
        return [record]

    old, new = ("a" * 40, "2026-01-01T00:00:00Z"), ("b" * 40, "2026-01-02T00:00:00Z")
    write_run(tmp_path, "r1", pair("left", "r1", *old) + pair("good", "r1", *old))
    write_run(tmp_path, "r2", pair("good", "r2", *new) + pair("bad", "r2", *new, status="wrong", reason="error 3"))
    with opened(tmp_path) as history:
        rows = {row["technique"]: row for row in query.overview(history)}
        assert rows["good"]["speedup"] == {"value": pytest.approx(2.0), "low": pytest.approx(1.9),
                                           "high": pytest.approx(2.1), "workloads": 1}  # fmt: skip
        assert (rows["good"]["status"], rows["good"]["stale"]) == ("passed", False)
        assert (rows["left"]["stale"], rows["left"]["behind"]) == (True, 1)
        assert (rows["bad"]["status"], rows["bad"]["speedup"], rows["bad"]["reason"]) == ("wrong", None, "error 3")
        assert [row["technique"] for row in query.failures(history)] == ["bad"]


def test_the_newest_is_by_the_line_of_commits_and_not_by_time(
    tmp_path: Path, make_record: Make, write_run: Write
) -> None:
    first = make_record(0, run="r1", commit="a" * 40, commit_date="2026-01-01T00:00:00Z", time="2026-02-09T00:00:00Z")
    second = make_record(0, run="r2", commit="b" * 40, commit_date="2026-01-02T00:00:00Z", time="2026-02-01T00:00:00Z")
    write_run(tmp_path, "r1", [first])  # an old commit measured again, later
    write_run(tmp_path, "r2", [second])
    with opened(tmp_path) as history:
        assert query.latest(history)[0]["run"] == "r2"
        assert [p["commit"][0] for p in query.series(history, key_of(first))] == ["a", "b"]
        since = query.series(history, key_of(first), since="2026-01-02")
        assert [p["commit"][0] for p in since] == ["b"]


def test_a_workload_that_was_defined_anew_takes_the_place_of_the_old_one(
    tmp_path: Path, make_record: Make, write_run: Write
) -> None:
    old, new = ("a" * 40, "2026-01-01T00:00:00Z"), ("b" * 40, "2026-01-02T00:00:00Z")

    def run(name: str, at: tuple[str, str], workload_id: str, *variants: str, **more: Any) -> None:
        records = [
            make_record(number, run=name, commit=at[0], commit_date=at[1], workload_id=workload_id, variant=variant)
            for number, variant in enumerate(variants)
        ]
        write_run(tmp_path, name, [record | more for record in records])

    run("r1", old, "first", "baseline", "optimized", "liger")
    run("r2", new, "second", "baseline", "optimized")
    run("r3", old, "other", "baseline", dtype="bfloat16")
    run("r4", new, "third", "baseline", dirty=True)
    with opened(tmp_path) as history:
        found = sorted((row["variant"], row["workload_id"]) for row in query.latest(history))
        assert found == [("baseline", "other"), ("baseline", "second"), ("optimized", "second")]
        assert query.overview(history)[0]["workloads"] == 1
        assert {row["workload_id"] for row in query.series_list(history)} == {"first", "second", "other", "third"}


def test_whole_records_come_back_whole(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    record = make_record(0, conditions={"clock": [1, 2, 3]}, samples={"values": [1e-3, 2e-3], "clock": "wall"})
    write_run(tmp_path, "r1", [record])
    for _ in range(2):
        with opened(tmp_path) as history:
            assert query.record(history, "r1-0") == record
            assert query.run_records(history, "r1") == [record]
            with pytest.raises(UsageError, match="no record"):
                query.record(history, "nothing")
            with pytest.raises(UsageError, match="unknown run"):
                query.run_records(history, "r0")
        compact(Store(tmp_path))


def test_serving_and_scaling(tmp_path: Path) -> None:
    generate(Store(tmp_path), Shape(records=2000, techniques=9, gpus=1))
    with opened(tmp_path) as history:
        serve = query.serving(history)
        assert {row["family"] for row in serve} == {"serving"}
        assert all(row["m_ttft_p50"] > 0 for row in serve if row["status"] == "passed")
        scale = query.scaling(history)
        assert {row["family"] for row in scale} == {"parallel"}
        assert {row["ranks"] for row in scale} == {1, 2, 4}
        found = query.aggregate(history, ["latency", "speedup"], gpu=["h200"])
        assert all(len(row["v_latency"]) >= 1 for row in found)


def test_a_series_has_a_name_for_urls(make_record: Make) -> None:
    key = key_of(make_record(0), "speedup")
    assert key.text == "t/optimized/abc/float32/h200/1/1/events/cold/speedup"
    assert SeriesKey.parse(key.text) == key
    with pytest.raises(UsageError, match="form"):
        SeriesKey.parse("t/optimized")
    with pytest.raises(UsageError, match="did you mean"):
        SeriesKey.parse(key.text + "s")
    with pytest.raises(UsageError, match="unknown filter"):
        query.where({"technik": 1})


@pytest.mark.parametrize("name", ["tests/test_a.py::test_b", "50 %2F", "-", "a/b"])
def test_a_series_of_any_name_has_a_word_and_is_found_by_it(
    name: str, tmp_path: Path, make_record: Make, write_run: Write
) -> None:
    record = make_record(0, technique=name, gpu="EPYC / Zen", variant="-")
    key = key_of(record, "latency")
    assert key.text.count("/") == 9
    assert SeriesKey.parse(key.text) == key
    write_run(tmp_path, "r", [record])
    history = History([Store(tmp_path)], threads=1)
    history.refresh()
    assert query.resolve_series(history, key.text) == key
    assert query.resolve_series(history, name) == key
    assert query.resolve_series(history, f"{name}:speedup").metric == "speedup"
    with pytest.raises(UsageError, match="unknown metric"):
        query.resolve_series(history, "t/optimized:sped")
    assert [str(v.key.technique) for v in judge(history, kept_in=tmp_path / "kept")] == [name]


def test_text_from_the_store_is_never_sql(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    evil = "x'; DROP TABLE latest; --"
    write_run(tmp_path / "it's", "r1", [make_record(0, technique=evil, gpu="o'gpu")])
    with opened(tmp_path / "it's") as history:
        assert query.latest(history, technique=evil)[0]["technique"] == evil
        assert query.series(history, SeriesKey.of(query.series_list(history)[0], "latency"))


def test_odd_types_make_empty_columns_and_no_crash(tmp_path: Path, make_record: Make) -> None:
    odd = make_record(0, floor="none", work=[1], host={"gpu_count": "two"}, check={"passed": "yes"}, dims=[1])
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "r1.jsonl").write_text(json.dumps(odd) + "\n")
    with opened(tmp_path) as history:
        row = history.rows("SELECT * FROM records")[0]
        assert row["gpu_count"] is None
        assert row["check_passed"] is None
    assert len({name for name, _ in columns()}) == len(columns())


def test_a_place_nobody_recorded_is_an_orphan(tmp_path: Path) -> None:
    with opened(tmp_path) as history:
        assert history.order.place("x") == Place("x", -1, "orphan")


def test_a_file_that_goes_away_under_a_query_is_no_crash(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    write_run(tmp_path, "r1", [make_record(0)])
    compact(Store(tmp_path))
    with opened(tmp_path) as history:
        next(tmp_path.rglob("*.parquet")).unlink()
        write_run(tmp_path, "r2", [make_record(0, run="r2")])
        assert [row["run"] for row in query.runs(history)] == ["r2"]
