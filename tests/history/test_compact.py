"""Compacting loses no byte, whoever writes, reads or dies meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.errors import StoreError
from harness.history import compact as module
from harness.history.compact import compact, restore, stored_lines
from harness.history.store import Store

Make = Callable[..., dict[str, Any]]
Write = Callable[[Path, str, list[dict[str, Any]]], Path]


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*.jsonl")}


def ids(root: Path) -> list[str]:
    return sorted(record["id"] for record in Store(root).read())


def test_every_byte_comes_back(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    root = tmp_path / "store"
    odd = {"name": 'quote " slash \\ \u2028 tab\t, ünïcode 🙂', "empty": {}, "list": [1, 2.5, None, True], "big": 2**60}
    for run in ("r1", "r2", "r3"):
        gpu = "l40s" if run == "r3" else "h200"
        write_run(root, run, [make_record(n, run=run, gpu=gpu, odd=odd, reason="line\nbreak") for n in range(4)])
    # Spacing and the order of keys are the writer's own: they come back too.
    (root / "h200" / "r4.jsonl").write_text(json.dumps(make_record(0, run="r4"), indent=None, sort_keys=True) + "\n")
    before, records = files(root), list(Store(root).read())
    done = compact(Store(root))
    assert files(root) == {}
    assert done.records == 13
    assert len(done.written) == 2
    assert sorted(done.files) == sorted(before)
    key = lambda record: record["id"]  # noqa: E731
    assert sorted(Store(root).read(), key=key) == sorted(records, key=key)
    assert sorted(restore(Store(root), tmp_path / "back")) == sorted(before)
    assert files(tmp_path / "back") == before
    with pytest.raises(StoreError, match="exists already"):
        restore(Store(root), tmp_path / "back")


def test_what_is_not_finished_or_not_sound_is_left_alone(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    write_run(tmp_path, "good", [make_record(0, run="good")])
    torn = write_run(tmp_path, "torn", [make_record(0, run="torn")])
    with torn.open("a") as file:
        file.write('{"schema": 1, "id"')
    (tmp_path / "h200" / "empty.jsonl").touch()
    newer = {**make_record(0, run="newer"), "schema": 99}
    (tmp_path / "h200" / "newer.jsonl").write_text(json.dumps(newer) + "\n")
    open_run = Store(tmp_path).open_run("h200", "open")
    open_run.append(make_record(0, run="open"))
    done = compact(Store(tmp_path))
    left = {Path(file).stem: reason for file, reason in done.left}
    assert done.files == ["h200/good.jsonl"]
    assert set(left) == {"torn", "empty", "newer", "open"}
    assert left["open"] == "being written"
    assert "line 2" in left["torn"]
    assert "newer" in left["newer"]
    open_run.append(make_record(1, run="open"))  # the writer never noticed
    open_run.close()
    assert ids(tmp_path) == ["good-0", "open-0", "open-1", "torn-0"]
    assert compact(Store(tmp_path)).files == ["h200/open.jsonl"]


def test_a_kill_between_rename_and_removal_makes_no_second_record(
    tmp_path: Path, make_record: Make, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, "r1", [make_record(n) for n in range(3)])
    content = path.read_bytes()
    compact(Store(tmp_path))
    path.write_bytes(content)
    reading = Store(tmp_path).read()
    assert len(list(reading)) == 3
    assert reading.duplicates == 3


def test_a_kill_before_the_rename_changes_nothing(
    tmp_path: Path, make_record: Make, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, "r1", [make_record(n) for n in range(3)])
    before = files(tmp_path)
    monkeypatch.setattr(module, "_digests", lambda path: {})
    with pytest.raises(StoreError, match="nothing was removed"):
        compact(Store(tmp_path))
    assert files(tmp_path) == before
    assert list(tmp_path.rglob(".*.tmp")) == []
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_run_that_grew_while_it_was_compacted_stays(
    tmp_path: Path, make_record: Make, write_run: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, "r1", [make_record(0)])
    honest = module._digests

    def late(source: Path) -> dict[str, str]:
        other = {**make_record(1)}
        with path.open("a") as file:  # as a writer on a file system without locks would
            file.write(json.dumps(other) + "\n")
        return honest(source)

    monkeypatch.setattr(module, "_digests", late)
    done = compact(Store(tmp_path))
    assert done.files == []
    assert "changed" in done.left[0][1]
    assert ids(tmp_path) == ["r1-0", "r1-1"]


def test_a_reader_meets_a_compaction_and_misses_nothing(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    for run in ("r1", "r2", "r3"):
        write_run(tmp_path, run, [make_record(0, run=run)])
    reading = iter(Store(tmp_path).read())
    first = next(reading)
    compact(Store(tmp_path))
    assert sorted([first["id"], *(record["id"] for record in reading)]) == ["r1-0", "r2-0", "r3-0"]


def test_two_compactions_do_not_meet(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    write_run(tmp_path, "r1", [make_record(0)])
    with module._alone(Store(tmp_path)), pytest.raises(StoreError, match="another compaction"):
        compact(Store(tmp_path))
    with pytest.raises(StoreError, match="no such folder"):
        compact(Store(tmp_path / "nowhere"))


def test_young_files_can_be_left_alone(tmp_path: Path, make_record: Make, write_run: Write) -> None:
    path = write_run(tmp_path, "r1", [make_record(0)])
    assert compact(Store(tmp_path), min_age_s=3600).files == []
    os.utime(path, (1e9, 1e9))
    assert compact(Store(tmp_path), min_age_s=3600).files == ["h200/r1.jsonl"]


@pytest.mark.parametrize("content", [b"no parquet at all", b""])
def test_a_foreign_parquet_file_is_damage(tmp_path: Path, make_record: Make, write_run: Write, content: bytes) -> None:
    write_run(tmp_path, "r1", [make_record(0)])
    (tmp_path / "h200" / "x.parquet").write_bytes(content)
    reading = Store(tmp_path).read()
    assert len(list(reading)) == 1
    assert "x.parquet" in str(reading.damage[0])


def test_somebody_elses_table_is_damage(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "h200").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "h200" / "x.parquet")
    with pytest.raises(StoreError, match="foreign"):
        list(stored_lines(Store(tmp_path), "h200/x.parquet"))
