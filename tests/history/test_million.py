"""One million records on two cores: a dashboard's questions within 1 s warm and 3 s cold, in less than 2 GiB.

What is judged is CPU time over all threads: on idle cores the wall clock shows no more than that, and a neighbour does
not make the test fail. Both are printed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RECORDS = 1_000_000

#: A fresh process: opens the history, asks everything, and again; prints seconds by question and the memory peak.
ASK = """
import json, resource, sys, time
start = time.process_time(), time.perf_counter()
from pathlib import Path
from harness.history import query
from harness.history.engine import History
from harness.history.query import SeriesKey
from harness.history.store import Store
from harness.regress.compare import compare
history = History([Store(sys.argv[1])], threads=2)
history.refresh()
rows = query.overview(history)
took = {"cold": time.process_time() - start[0]}
wall = {"cold": time.perf_counter() - start[1]}
assert len(rows) == 160
assert history.rows("SELECT count(*) AS n FROM records")[0]["n"] == int(sys.argv[2])
newest = query.runs(history, limit=1)[0]["run"]
commits = [place.commit for place in history.order.sort(history.order.places)]
keys = [SeriesKey.of(row, "latency") for row in query.series_list(history)]
asked = {
    "state": history.state,
    "refresh": history.refresh,
    "facets": lambda: query.facets(history),
    "overview": lambda: query.overview(history),
    "overview of a GPU type": lambda: query.overview(history, gpu="h200"),
    "variants": lambda: query.latest(history, technique="attention_01", gpu="h200"),
    "series list": lambda: query.series_list(history, technique="attention_01"),
    "series": lambda: query.series(history, keys[7]),
    "another series": lambda: query.series(history, keys[-7]),
    "runs": lambda: query.runs(history),
    "runs of a GPU type": lambda: query.runs(history, gpu="l40s"),
    "records of a run": lambda: query.run_records(history, newest),
    "a record": lambda: query.record(history, newest + "-run"),
    "failures": lambda: query.failures(history),
    "serving": lambda: query.serving(history),
    "scaling": lambda: query.scaling(history),
    "GPU types": lambda: query.gpus(history),
    "two commits": lambda: compare(history, commits[3], commits[-3], ["latency", "speedup"]),
    "two GPU types": lambda: compare(history, "gpu:h200", "gpu:l40s", ["latency"]),
}
for name, ask in asked.items():
    times = []
    for _ in range(3):
        begin = time.process_time(), time.perf_counter()
        ask()
        times.append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    took[name], wall[name] = (min(column) for column in zip(*times))
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"seconds": took, "wall": wall, "peak_kib": peak}))
"""


def ask(root: Path, cache: Path) -> dict[str, Any]:
    env = {**os.environ, "PAIRBENCH_CACHE": str(cache), "PYTHONPATH": os.getcwd()}
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(root), str(RECORDS)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_million_records_answer_in_time(tmp_path: Path, million: Path) -> None:
    first = ask(million, tmp_path / "cache")  # also looks for duplicates, once
    again = [ask(million, tmp_path / "cache") for _ in range(2)]
    print(json.dumps([first, *again], indent=1))
    assert min(said["seconds"]["cold"] for said in [first, *again]) < 3.0
    for said in (first, *again):
        assert said["peak_kib"] < 2 << 20
    slow = {
        name: seconds
        for name in first["seconds"]
        if name != "cold" and (seconds := min(said["seconds"][name] for said in (first, *again))) >= 1.0
    }
    assert slow == {}
