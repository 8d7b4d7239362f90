"""The store: nothing is overwritten, nothing is dropped in silence, and what cannot be read is named."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.errors import DamagedStore, StoreError
from harness.history.store import Store, checkout_store, default_store, gpu_folder, read_all, stores_to_read
from harness.record import SCHEMA, RecordError, metric, to_line


def make(number: int, run: str = "r1", **more: Any) -> dict[str, Any]:
    """A sound measurement."""
    return {
        "schema": 1,
        "method": 1,
        "type": "measurement",
        "id": f"{run}-{number}",
        "run": run,
        "time": "2026-01-31T00:00:00.000Z",
        "commit": "a" * 40,
        "branch": "main",
        "dirty": False,
        "gpu": "h200",
        "machine": "m1",
        "technique": "t",
        "family": "fusion",
        "kind": "op",
        "layer": "kernel",
        "variant": "baseline",
        "peer": False,
        "workload": "w",
        "workload_id": "abc",
        "dtype": "float32",
        "tier": "quick",
        "ranks": 1,
        "status": "passed",
        "reason": None,
        "metrics": {"latency": metric("latency", 1e-3)},
        **more,
    }


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.open_run("NVIDIA H200", "r1") as run:
        for number in range(3):
            run.append(make(number))
    assert (tmp_path / "NVIDIA-H200" / "r1.jsonl").read_bytes() == b"".join(to_line(make(n)).encode() for n in range(3))
    reading = store.read()
    assert list(reading) == [make(n) for n in range(3)]
    assert reading.damage == []
    reading.raise_damage()


def test_a_line_is_there_before_the_run_is_closed(tmp_path: Path) -> None:
    run = Store(tmp_path).open_run("h200", "r1")
    run.append(make(0))
    assert [r["id"] for r in Store(tmp_path).read()] == ["r1-0"]
    run.close()
    with pytest.raises(StoreError, match="closed"):
        run.append(make(1))


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open_run("h200", "r1").close()
    with pytest.raises(StoreError, match=r"r1\.jsonl exists already"):
        store.open_run("h200", "r1")


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "a b"])
def test_a_run_id_must_name_a_file(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(StoreError, match="cannot name a file"):
        Store(tmp_path).open_run("h200", run_id)


def test_an_unwritable_store_is_said_at_the_opening(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="--store"):
        Store(tmp_path / "file").open_run("h200", "r1")
    with pytest.raises(StoreError, match="/proc"):
        Store("/proc/nowhere").open_run("h200", "r1")


@pytest.mark.parametrize("url", ["nonsense://bucket/x", ""])
def test_an_unknown_kind_of_url_is_said(url: str) -> None:
    with pytest.raises(StoreError, match="store"):
        Store(url)


def test_a_gpu_names_a_folder() -> None:
    assert gpu_folder("AMD EPYC 9B14 (2 cores)/x") == "AMD-EPYC-9B14-2-cores-x"
    with pytest.raises(StoreError, match="cannot name a folder"):
        gpu_folder("../")


def test_an_unfit_record_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    with Store(tmp_path).open_run("h200", "r1") as run:
        with pytest.raises(RecordError, match="nan"):
            run.append(make(0, metrics={"latency": {"value": float("nan"), "unit": "s", "better": "lower"}}))
        run.append(make(1))
    assert [r["id"] for r in Store(tmp_path).read()] == ["r1-1"]


def test_damage_is_named_by_file_and_line_and_the_rest_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    folder.mkdir()
    lines = [
        to_line(make(0)),
        '{"schema": 1, "id": "x", "ru\n',
        '{"hello": 1}\n',
        json.dumps({**make(3), "schema": SCHEMA + 1}) + "\n",
        json.dumps({**make(4), "status": "fine"}) + "\n",
        json.dumps({**make(5), "samples": {"values": [float("inf")]}}) + "\n",
        to_line(make(6)),
        to_line(make(7))[:50],
    ]
    (folder / "r1.jsonl").write_text("".join(lines))
    (folder / "notes.txt").write_text("a foreign file")
    (tmp_path / "README.md").write_text("may lie here")
    (folder / ".x.tmp").write_text("a temporary file of a compactor")
    reading = Store(tmp_path).read()
    assert [r["id"] for r in reading] == ["r1-0", "r1-6"]
    found = {(Path(d.file).name, d.line): d.reason for d in reading.damage}
    assert set(found) == {("notes.txt", 0), *(("r1.jsonl", n) for n in (2, 3, 4, 5, 6, 8))}
    assert "newer" in found["r1.jsonl", 4]
    assert "upgrade" in found["r1.jsonl", 4]
    assert "fine" in found["r1.jsonl", 5]
    assert "inf" in found["r1.jsonl", 6]
    assert "breaks off" in found["r1.jsonl", 8]
    with pytest.raises(DamagedStore, match=r"r1\.jsonl:2"):
        reading.raise_damage()


def test_a_record_that_two_files_hold_is_read_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "a")
    for run_id in ("r1", "r2"):
        with store.open_run("h200", run_id) as run:
            run.append(make(0))
    reading = store.read()
    assert len(list(reading)) == 1
    assert reading.duplicates == 1
    other = Store(tmp_path / "b")
    with other.open_run("h200", "r1") as run:
        run.append(make(0))
        run.append(make(1))
    assert sorted(r["id"] for r in read_all([store, other])) == ["r1-0", "r1-1"]


def test_which_stores_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path / "data"))
    assert default_store() == tmp_path / "data" / "history"
    checkout = tmp_path / "checkout"
    (checkout / "results" / "history").mkdir(parents=True)
    (checkout / "harness").mkdir()
    (checkout / "harness" / "record.py").write_text("")
    (checkout / "deep").mkdir()
    monkeypatch.chdir(checkout / "deep")
    assert checkout_store() == checkout / "results" / "history"
    assert [s.url for s in stores_to_read()] == [str(default_store()), str(checkout / "results" / "history")]
    assert [s.url for s in stores_to_read(str(checkout))] == [str(checkout)]
    with pytest.raises(StoreError, match="no such folder"):
        stores_to_read(str(tmp_path / "nowhere"))
    monkeypatch.delenv("PAIRBENCH_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert default_store() == tmp_path / "xdg" / "pairbench" / "history"


FULL_DISK = """
import resource, sys
sys.path.insert(0, {tests!r})
from test_store import make
from harness.errors import StoreError
from harness.history.store import Store
run = Store({store!r}).open_run("h200", "r1")
resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
for number in range(6):
    run.append(make(number))
assert run.spilled is not None
try:
    run.close()
except StoreError as err:
    print(err)
"""


def test_a_full_disk_spills_and_says_where(tmp_path: Path) -> None:
    """The limit on a file's size stands in for the full disk: the kernel refuses the rest of a line in the same way."""
    size = len(to_line(make(0)))
    assert 3 * size < 2500 < 6 * size
    code = FULL_DISK.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"))
    env = {**os.environ, "TMPDIR": str(tmp_path / "spill"), "PYTHONPATH": os.getcwd()}
    (tmp_path / "spill").mkdir()
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "cannot append to h200/r1.jsonl: File too large" in done.stdout
    kept = list(Store(tmp_path / "store").read())
    reading = Store(next((tmp_path / "spill").iterdir())).read()
    spilled = list(reading)
    assert kept
    assert spilled
    assert [r["id"] for r in kept + spilled] == [f"r1-{n}" for n in range(6)]
    assert reading.damage == []  # no torn line was left on either side
    assert f"{len(spilled)} record(s) were kept in {tmp_path / 'spill'}" in done.stdout


def test_a_store_that_refuses_everything_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Store(tmp_path).open_run("h200", "r1")

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(StoreError, match="No space left"):
        run.append(make(0))


APPENDER = """
import sys
sys.path.insert(0, {tests!r})
from test_store import make
from harness.history.store import Store
name = sys.argv[1]
run = Store({store!r}).open_run("h200", name)
print("ready", flush=True)
number = 0
while True:
    run.append(make(number, run=name, samples={{"values": [0.001] * 300}}))
    print(number, flush=True)
    number += 1
"""


def test_eight_writers_killed_at_random_lose_no_finished_record(tmp_path: Path) -> None:
    code = APPENDER.format(tests=str(Path(__file__).parent), store=str(tmp_path / "store"))
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    outs = [tmp_path / f"out{n}" for n in range(8)]
    jobs = []
    for number, out in enumerate(outs):
        with out.open("w") as file:
            jobs.append(subprocess.Popen([sys.executable, "-c", code, f"w{number}"], env=env, stdout=file))
    try:
        deadline = time.monotonic() + 60
        while not all(len(out.read_text().split()) > 3 for out in outs):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        dice = random.Random(7)
        for job in dice.sample(jobs, len(jobs)):
            time.sleep(dice.random() * 0.1)
            job.send_signal(signal.SIGKILL)
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    reading = Store(tmp_path / "store").read()
    there = {r["id"] for r in reading}
    for number, out in enumerate(outs):
        acknowledged = [
            word
            for line in out.read_text().splitlines(keepends=True)
            if line.endswith("\n")
            for word in line.split()
            if word != "ready"
        ]
        assert acknowledged
        assert {f"w{number}-{n}" for n in acknowledged} <= there
    assert all("torn" in d.reason for d in reading.damage)  # at most the record in hand
    assert len(reading.damage) <= 8


def test_an_append_takes_under_five_milliseconds(tmp_path: Path) -> None:
    record = make(0, samples={"values": [0.0012345678] * 500})
    times = []
    with Store(tmp_path).open_run("h200", "r1") as run:
        for _ in range(50):
            start = time.perf_counter()
            run.append(record)
            times.append(time.perf_counter() - start)
    assert sorted(times)[len(times) // 2] < 5e-3
