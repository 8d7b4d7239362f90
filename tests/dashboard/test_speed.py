"""One million records on two cores: the first page within 3 s, any filter within 1 s, in less than 2 GiB.

What is judged is CPU time over all threads, as in tests/history/test_million.py: on idle cores the wall clock shows no
more than that, and a neighbour does not make the test fail. Judging waits for pages, and is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST_S, FILTER_S, MEMORY_KIB = 3.0, 1.0, 2 << 20

#: A fresh process, warm as the command makes it: draws pages, then filters on each; prints CPU seconds and the peak.
DRAW = """
import json, os, sys, time
from streamlit.testing.v1 import AppTest
from streamlit.util import calc_hash
from dashboard.serve import _warm
from dashboard.source import Source
Source.judge = lambda self: self.judged
_warm(os.environ["PAIRBENCH_DASHBOARD_STORE"], "HEAD")
asked = {
    "overview": [{"gpu": "h200"}, {"family": "fusion"}],
    "technique": [{"technique": "moe_07"}, {"technique": "moe_07", "gpu": "h100-sxm"}],
    "history": [{"technique": "moe_07", "gpu": "h200"}, {"technique": "moe_07", "gpu": "l40s", "metric": "speedup"}],
    "regressions": [{"gpu": "h200"}],
    "compare": [{"a": "gpu:h200", "b": "gpu:l40s"}, {"a": "gpu:h200", "b": "gpu:h100-sxm", "metric": "speedup"}],
    "serving": [{"gpu": "h200"}],
    "scaling": [{"gpu": "h200"}],
    "runs": [{"gpu": "h200"}, {"broken": "1"}],
}
first, filters = {}, {}
def draw(page, query):
    test = AppTest.from_file("dashboard/app.py", default_timeout=300)
    test._page_hash = calc_hash(page) if page != "overview" else ""
    for name, value in query.items():
        test.query_params[name] = value
    begin = time.process_time()
    test.run()
    took = time.process_time() - begin
    assert not test.exception, test.exception[0].message
    return took
for page, queries in asked.items():
    first[page] = draw(page, {})
    for query in queries:
        filters[f"{page} {query}"] = draw(page, query)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"first": first, "filters": filters, "peak_kib": peak}))
"""


def draw(store: Path, cache: Path) -> dict[str, Any]:
    env = {**os.environ, "PAIRBENCH_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    env |= {"PAIRBENCH_DASHBOARD_STORE": str(store), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", DRAW], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_million_records_are_drawn_in_time(tmp_path: Path, million: Path) -> None:
    draw(million, tmp_path / "cache")  # makes the index, once
    runs = [draw(million, tmp_path / "cache") for _ in range(2)]
    print(json.dumps(runs, indent=1))
    for kind, bound in (("first", FIRST_S), ("filters", FILTER_S)):
        best = {name: min(run[kind][name] for run in runs) for name in runs[0][kind]}
        assert {name: seconds for name, seconds in best.items() if seconds >= bound} == {}
    assert max(run["peak_kib"] for run in runs) < MEMORY_KIB
