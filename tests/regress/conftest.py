"""A repository of commits and a store of runs on them, to judge."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.history.engine import History
from harness.history.order import Repository
from harness.history.store import Store
from harness.record import metric

DATE = "2026-01-01T00:00:00Z"


class World:
    """A git repository and a store; ``nightly`` commits and records one run."""

    def __init__(self, root: Path) -> None:
        self.root = root / "repo"
        self.store = root / "store"
        self.store.mkdir(parents=True)
        self.root.mkdir()
        self.dice = random.Random(5)
        self.count = 0
        self.commits: list[str] = []
        self.git("init", "-q", "-b", "main")

    def git(self, *args: str) -> str:
        who = {f"GIT_{a}_{b}": "t@example.org" for a in ("AUTHOR", "COMMITTER") for b in ("NAME", "EMAIL")}
        env = {"PATH": os.environ["PATH"], "HOME": str(self.root), "GIT_CONFIG_NOSYSTEM": "1", **who,
               "GIT_AUTHOR_DATE": DATE, "GIT_COMMITTER_DATE": DATE}  # fmt: skip
        return subprocess.run(
            ["git", *args], cwd=self.root, env=env, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, subject: str) -> str:
        self.git("commit", "-q", "--allow-empty", "-m", subject)
        self.commits.append(self.git("rev-parse", "HEAD"))
        return self.commits[-1]

    def record(self, variant: str, latency: float, run: str, commit: str, **more: Any) -> dict[str, Any]:
        """One measurement."""
        self.count += 1
        return {
            "schema": 1,
            "method": 1,
            "type": "measurement",
            "id": f"{run}-{self.count}",
            "run": run,
            "time": f"2026-01-01T00:00:{self.count % 60:02d}.000Z",
            "commit": commit,
            "branch": "main",
            "dirty": False,
            "gpu": "h200",
            "machine": "m1",
            "technique": "norm",
            "family": "fusion",
            "kind": "op",
            "layer": "kernel",
            "variant": variant,
            "peer": "",
            "workload": "rows",
            "workload_id": "abc",
            "dtype": "float32",
            "tier": "quick",
            "ranks": 1,
            "status": "passed",
            "reason": None,
            "reproduce": "pairbench run norm --workload rows",
            "host": {"device": "cuda", "gpu_name": "H200"},
            "stack": {"torch": "2.11.0", "triton": "3.6.0"},
            "samples": {"values": [latency] * 3, "clock": "events", "cache": "cold"},
            "metrics": {"latency": metric("latency", latency, latency * 0.998, latency * 1.002)},
            **more,
        }

    def run(
        self, commit: str, optimized: float = 1e-3, baseline: float = 2e-3, machine: float = 1.0, **more: Any
    ) -> str:
        """Record one run of a pair at a commit, with the sentinel; gives the run id."""
        run = f"r{len(list(self.store.rglob('*.jsonl'))):03d}"

        def noisy(value: float) -> float:
            return value * machine * self.dice.gauss(1, 0.002)

        slow, fast = (self.record(name, noisy(value), run, commit, **more) for name, value in
                      (("baseline", baseline), ("optimized", optimized)))  # fmt: skip
        speedup = slow["metrics"]["latency"]["value"] / fast["metrics"]["latency"]["value"]
        fast["metrics"]["speedup"] = metric("speedup", speedup, speedup * 0.997, speedup * 1.003)
        common = {
            key: fast[key] for key in ("schema", "method", "run", "time", "commit", "branch", "dirty", "gpu", "machine")
        }
        reading = {"matmul_s": noisy(2e-4), "copy_s": noisy(5e-4)}
        sentinel = {**common, "type": "sentinel", "id": f"{run}-s", "when": "start", "reading": reading}
        with Store(self.store).open_run(str(fast["gpu"]), run) as writer:
            for record in (sentinel, slow, fast):
                writer.append(record)
        return run

    def nights(self, count: int, subject: str = "change", **more: Any) -> None:
        """So many commits, each measured once."""
        for number in range(count):
            self.run(self.commit(f"{subject} {number}"), **more)

    def history(self, branch: str = "main") -> History:
        """The history as a reader in the repository sees it."""
        history = History([Store(self.store)], Repository(self.root), branch, threads=1)
        history.refresh()
        return history


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """An empty repository and an empty store; the user's own folders are left alone."""
    monkeypatch.setenv("PAIRBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path / "data"))
    return World(tmp_path)


@pytest.fixture
def in_world(world: World, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the working directory the world's checkout, as the command line finds it."""

    def enter() -> None:
        (world.root / "harness").mkdir(exist_ok=True)
        (world.root / "harness" / "record.py").write_text("")
        monkeypatch.chdir(world.root)

    return enter
