"""Stores in every state that the pages must stand, and a page drawn over one without a browser."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("streamlit", reason="the dashboard's extra is not installed")
pytest.importorskip("duckdb", reason="the history's extra is not installed")

from harness.record import metric, to_line

APP = Path(__file__).resolve().parents[2] / "dashboard" / "app.py"
PAGES = ("overview", "technique", "history", "regressions", "compare", "serving", "scaling", "runs")
#: Text that a store may hold and that must stay text.
EVIL = "<img src=x onerror=alert(1)> [x](javascript:alert(2)) $\\LaTeX$ :red[no] **bold** `code` www.evil.example"
STEP_AT = 10
COMMITS = 18


class Maker:
    """Writes runs with declared commits into a store."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.dice = random.Random(3)
        self.count = 0

    def common(self, at: int, gpu: str, dirty: bool = False) -> dict[str, Any]:
        day = f"2026-03-{at + 1:02d}"
        return {
            "schema": 1,
            "method": 1,
            "run": f"202603{at + 1:02d}T000000Z-{gpu[:4]}{at:04d}",
            "time": f"{day}T00:00:00.000Z",
            "commit": f"{at:02d}" * 20,
            "branch": "main",
            "dirty": dirty,
            "gpu": gpu,
            "machine": "m1",
            "declared": True,
            "commit_date": f"{day}T00:00:00Z",
            "commit_subject": EVIL if at % 4 == 2 else f"Change {at}",
            "stack": {"torch": "2.11.0" if at < 6 else "2.12.0", "triton": "3.6.0", "driver": "580"},
            "host": {"device": "cuda", "gpu_name": gpu.upper(), "gpu_count": 1},
        }

    def measurement(
        self, common: dict[str, Any], technique: str, variant: str, latency: float | None, **more: Any
    ) -> dict:
        self.count += 1
        record: dict[str, Any] = {
            **common,
            "type": "measurement",
            "id": f"{common['run']}-{self.count:05d}",
            "technique": technique,
            "family": "fusion",
            "kind": "op",
            "layer": "kernel",
            "variant": variant,
            "peer": "torch" if variant == "torch_compile" else "",
            "workload": "w",
            "workload_id": "id0",
            "dtype": "bfloat16",
            "tier": "quick",
            "ranks": 1,
            "status": "passed",
            "reason": "",
            "claim": {"latency": "lower", "memory": "lower", "cost": EVIL},
            "dims": {"rows": 8},
            "metrics": {},
            "reproduce": f"pairbench run {technique} --workload w",
        } | more
        if latency is not None:
            own = {
                "latency": metric("latency", latency, latency * 0.995, latency * 1.005),
                "throughput": metric("throughput", 8 / latency, unit="rows/s"),
                "peak_memory": metric("peak_memory", 2.0**20 * (2 if variant == "baseline" else 1)),
            }
            record["metrics"] = {**own, **record["metrics"]}
            record["samples"] = {"values": [latency] * 10, "clock": "events", "cache": "cold", "settled": True}
            record["check"] = {"rule": "same_precision", "passed": True, "error": 1e-3, "bound": 4e-3, "tensor": "out"}
            record["work"] = {"flops": 1e9, "bytes": 1e8, "items": 8, "unit": "rows"}
            record["floor"] = {"seconds": latency / 2, "limit": "memory", "share": 0.5}
            record["costs"] = {"compile_s": 1.5}
            record["conditions"] = {
                "available": True, "throttled": False, "contended": False, "why": [],
                "sm_mhz": {"min": 1755, "max": 1980, "last": 1980},
                "power_w": {"min": 650.0, "max": 699.0, "last": 690.0},
                "clock_reasons": ["sw_power_cap"], "power_capped": True, "other_processes": 0,
            }  # fmt: skip
        return record

    def pair(self, common: dict[str, Any], technique: str, slower: float = 1.0, **more: Any) -> list[dict[str, Any]]:
        base, fast = (value * self.dice.gauss(1, 0.003) for value in (2e-3, 1e-3))
        fast *= slower
        speed = {"speedup": metric("speedup", base / fast, base / fast * 0.99, base / fast * 1.01),
                 "speedup_peer": metric("speedup_peer", 1.1, 1.08, 1.12)}  # fmt: skip
        return [
            self.measurement(common, technique, "baseline", base, **more),
            self.measurement(common, technique, "optimized", fast, metrics=speed,
                             predicted={"speedup": 2.2}, **more),
        ]  # fmt: skip

    def run(self, at: int, gpu: str, dirty: bool = False, everything: bool = True) -> Path:
        common = self.common(at, gpu, dirty)
        slower = 1.3 if at >= STEP_AT and gpu == "h200" else 1.0
        records = self.pair(common, "add_rms_norm", slower)
        if everything:
            records += [
                *self.states(common),
                *self.serving(common),
                *self.parallel(common),
                *self.pair(common, EVIL, family="<b>family</b>"),
            ]
        ceilings = {
            "copy": 4.2e12,
            "matmul": {"bfloat16": 7e14, "float32": 5e13},
            "launch_eager": 9e-6,
            "refused": {"x": EVIL},
        }
        reading = {"matmul_s": 2e-4 * self.dice.gauss(1, 0.002), "copy_s": 5e-4 * self.dice.gauss(1, 0.002)}
        start = {**common, "type": "sentinel", "id": f"{common['run']}-s", "when": "start", "reading": reading,
                 "ceilings": ceilings, "moved": False}  # fmt: skip
        end = {
            **start,
            "id": f"{common['run']}-e",
            "when": "end",
            "moved": at == 5,
            "reason": EVIL if at == 5 else None,
        }
        run = {**common, "type": "run", "id": f"{common['run']}-r"}
        folder = self.root / gpu
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{common['run']}.jsonl"
        path.write_text("".join(to_line(record) for record in (run, start, *records, end)), encoding="utf-8")
        return path

    def states(self, common: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for status in ("wrong", "error", "oom", "timeout", "implausible", "skipped", "unsettled"):
            more: dict[str, Any] = {"status": status, "reason": EVIL}
            if status == "error":
                more["traceback"] = f"Traceback\n{EVIL}\n"
            found.append(self.measurement(common, f"state_{status}", "optimized", None, **more))
        return found

    def serving(self, common: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for load in (1, 2, 3):
            for variant, speed in (("baseline", 1.0), ("optimized", 1.6)):
                grid = [[q, 0.02 * load / speed * (1 + 4 * q)] for q in (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)]
                tenth = [[q, v / 10] for q, v in grid]
                figures = {
                    "output_rate": metric("output_rate", 100.0 * load * speed),
                    "ttft_p50": metric("ttft_p50", grid[2][1]),
                    "ttft_p99": metric("ttft_p99", grid[4][1]),
                    "itl_p99": metric("itl_p99", grid[4][1] / 10),
                    "goodput": metric("goodput", 1.0 * load),
                }
                serve = {
                    "ttft": grid, "itl": tenth, "tpot": tenth,
                    "span": 10.0, "cache_use": [[0.0, 0.1], [5.0, 0.8], [10.0, 0.2]],
                    "running": [[0.0, 1], [5.0, 4]],
                    "requests": {"total": 20 * load, "finished": 19 * load, "failed": load, "refused": 0},
                }  # fmt: skip
                found.append(
                    self.measurement(common, "paged_kv", variant, 0.01 * load, family="serving",
                                     kind="serve",
                                     workload=f"load{load}", workload_id=f"load{load}", metrics=figures, serve=serve)
                )  # fmt: skip
        return found

    def parallel(self, common: dict[str, Any]) -> list[dict[str, Any]]:
        found = []
        for ranks in (1, 2, 4):
            for variant, extra in (("baseline", 0.3), ("optimized", 0.1)):
                latency = 0.1 / ranks * (1 + extra * (ranks - 1))
                found.append(
                    self.measurement(
                        common, "pipeline", variant, latency, family="parallel", kind="step",
                        layer="system", ranks=ranks,
                        workload=f"long{ranks}", workload_id=f"long{ranks}",
                        metrics={"exposed_comm": metric("exposed_comm", latency * extra)},
                        counters={"link_bytes": 1e6 * (ranks - 1), "bubble": 0.2, "bubble_formula": 0.18,
                                  "saved_bytes": 2.0**21 / ranks},
                    )
                )  # fmt: skip
        return found


def whole(root: Path) -> Path:
    maker = Maker(root)
    for at in range(COMMITS):
        maker.run(at, "h200", everything=at > COMMITS - 3)
        if at < COMMITS - 1:
            maker.run(at, "l40s", everything=at == 3)
    maker.run(COMMITS, "cpu", dirty=True, everything=False)
    return root


def damaged(root: Path) -> Path:
    path = Maker(root).run(0, "h200")
    text = path.read_text(encoding="utf-8")
    newer = json.dumps({"schema": 99, "type": "measurement", "id": "n"}) + "\n"
    path.write_text(text + newer + f'{{"torn": "{"<b>"}', encoding="utf-8")
    (root / "h200" / "notes.txt").write_text("not a record")
    return root


def newer(root: Path) -> Path:
    """A store of which every record was written by a newer version."""
    (root / "h200").mkdir(parents=True)
    lines = [json.dumps({"schema": 99, "type": "measurement", "id": f"n{n}"}) + "\n" for n in range(5)]
    (root / "h200" / "20260301T000000Z-h2000000.jsonl").write_text("".join(lines), encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """State → store: ``whole``, ``empty``, ``one`` (a single run), ``damaged`` (torn, foreign, newer schema),
    ``newer`` (nothing but a newer schema)."""
    base = tmp_path_factory.mktemp("stores")
    (base / "empty").mkdir()
    Maker(base / "one").run(0, "h200")
    return {
        "whole": whole(base / "whole"),
        "empty": base / "empty",
        "one": base / "one",
        "damaged": damaged(base / "damaged"),
        "newer": newer(base / "newer"),
    }


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes and verdicts of these tests are kept apart from the user's."""
    before = os.environ.get("PAIRBENCH_CACHE")
    os.environ["PAIRBENCH_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    from dashboard.source import close_sources

    close_sources()
    if before is None:
        del os.environ["PAIRBENCH_CACHE"]
    else:
        os.environ["PAIRBENCH_CACHE"] = before


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Draws a page over a store: ``draw("history", store, technique="x")``; ``unfold`` names a fold that is open."""
    from streamlit.testing.v1 import AppTest
    from streamlit.util import calc_hash

    def drawn(page: str, store: Path | str, unfold: str = "", **query: str) -> Any:
        monkeypatch.setenv("PAIRBENCH_DASHBOARD_STORE", str(store))
        test = AppTest.from_file(str(APP), default_timeout=60)
        # AppTest switches only to files of a folder "pages"; the hash is what the browser sends for a page's name.
        test._page_hash = calc_hash(page) if page != "overview" else ""
        for name, value in query.items():
            test.query_params[name] = value
        if unfold:
            test.session_state[f"unfold {unfold}"] = True
        return test.run()

    return drawn


@pytest.fixture
def judged(stores: dict[str, Path]) -> Any:
    """The source of the whole store with every verdict made."""
    from dashboard.source import open_source

    source = open_source(str(stores["whole"]))
    source.judge_now()
    return source


@pytest.fixture(scope="session")
def evil() -> str:
    """Text that tries to be markup in HTML, Markdown and formulas."""
    return EVIL


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """Writes runs into an empty store."""
    return Maker(tmp_path / "made")
