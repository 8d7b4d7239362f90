"""A small repository with a history of its own, made from this checkout's harness and a technique that naps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAIR = '''"""nap: a technique whose speed is written down."""

import time

import torch

from harness.pair import Claim, Pair, Work


def inputs(workload, ctx):
    return {"x": ctx.randn(workload.rows, 4)}


def plain(x):
    time.sleep(0.004)
    return x * 2


def fast(x):
    time.sleep(OPTIMIZED)
    return x * 2


def oracle(x):
    return x * 2


def work(workload):
    return Work(flops=workload.rows * 4, bytes=workload.rows * 32, items=workload.rows, unit="rows")


PAIR = Pair(
    name="nap",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={"baseline": plain, "optimized": fastEXTRA},
    work=work,
    differentiable=(),
)
'''
SUITE = '''"""Workloads of nap."""

from suites.pair_suite import PairSuite

WORKLOADS = [{"name": "short", "tier": "smoke", "dtype": "float32", "rows": 64}]


class Nap(PairSuite):
    """asv's view of nap."""

    def setup_cache(self) -> object:
        """Measures once for all metrics."""
        return self.measure()
'''
PROJECT = """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "pairbench"
version = "0.1.0"

[tool.setuptools.packages.find]
include = ["harness", "harness.*", "impls", "impls.*", "suites", "suites.*"]
"""


@dataclass(frozen=True)
class Made:
    """The repository, its commits by what they are, and the folder of the user who works there."""

    path: Path
    home: Path
    commits: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        """What the user's shell holds: a home and a history of one's own, and little time to sample."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PAIRBENCH_", "ASV_", "PYTHON", "TRITON_"))}
        own = {"HOME": str(self.home), "PAIRBENCH_DATA": str(self.home / "data"), "PAIRBENCH_STORE": "results/history"}
        # The machine may be busy: what naps is told apart all the same, and asv shall have the numbers.
        return {**kept, **own, "PAIRBENCH_TIER": "smoke", "PAIRBENCH_BUDGET": "0.3", "PAIRBENCH_ASV_UNSETTLED": "1"}

    def asv(self, *words: str, fine: bool = True, **more: str) -> str:
        """What an asv command prints, errors included."""
        return self.call("asv", *words, fine=fine, **more)

    def call(self, module: str, *words: str, fine: bool = True, **more: str) -> str:
        """What ``python -m module words`` prints in the repository, errors included."""
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=self.path,
            env={**self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert (done.returncode == 0) is fine, f"{words} ended with {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout


@pytest.fixture(name="asv")
def _asv() -> Callable[..., Any]:
    return asv


def asv(code: str, home: Path, **more: str) -> Any:
    """What the code prints as JSON, with asv's plugin loaded in the way of asv."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PAIRBENCH_", "ASV_", "PYTHON"))}
    load = """
import json, os, sys
from asv.config import Config
from asv.plugin_manager import plugin_manager
conf = Config.load("asv.conf.json")
for plugin in conf.plugins:
    plugin_manager.import_plugin(plugin)
"""
    done = subprocess.run(
        [sys.executable, "-c", load + code],
        cwd=ROOT,
        env={**kept, "HOME": str(home), "PAIRBENCH_TIER": "smoke", **more},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(name="git")
def _git() -> Callable[..., str]:
    return git


def git(path: Path, *words: str) -> str:
    """Standard output of git, with a user and no settings of this machine."""
    who = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b.c",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b.c",
    }
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    env = {**os.environ, **who, **alone}
    return subprocess.run(["git", *words], cwd=path, env=env, check=True, capture_output=True, text=True).stdout.strip()


def pair(optimized: float, extra: bool) -> str:
    """The technique with an optimized variant that naps for so many seconds."""
    return PAIR.replace("OPTIMIZED", str(optimized)).replace("EXTRA", ', "extra": plain' if extra else "")


def make(path: Path, home: Path) -> Made:
    """Four commits: an old harness without the call of the suites, the technique, one more variant, a slower one."""
    for room in ("harness", "impls/fusion", "suites/fusion"):
        (path / room).mkdir(parents=True)
    shutil.copytree(
        ROOT / "harness", path / "harness", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )
    for package in ("impls", "impls/fusion", "suites", "suites/fusion"):
        (path / package / "__init__.py").write_text("")
    shutil.copy(ROOT / "asv.conf.json", path)
    shutil.copy(ROOT / "suites" / "pair_suite.py", path / "suites")
    (path / "pyproject.toml").write_text(PROJECT)
    (path / ".gitignore").write_text("__pycache__/\n*.egg-info/\n/build/\n/.asv/\n")
    (path / "suites" / "fusion" / "nap.py").write_text(SUITE)
    technique, call = path / "impls" / "fusion" / "nap.py", path / "harness" / "asv_api.py"
    git(path, "init", "-q", "-b", "main")
    commits = {}
    told = call.read_text()
    for name, text in (
        ("old", None),
        ("first", pair(0.002, False)),
        ("extra", pair(0.002, True)),
        ("slow", pair(0.02, True)),
    ):
        technique.write_text(text or pair(0.002, False))
        if text is None:
            call.unlink()
        else:
            call.write_text(told)
        git(path, "add", "-A")
        git(path, "commit", "-q", "-m", name)
        commits[name] = git(path, "rev-parse", "HEAD")
    return Made(path, home, commits)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The repository, nothing measured in it yet."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    pytest.importorskip("asv")
    pytest.importorskip("virtualenv")
    folder = tmp_path_factory.mktemp("made")
    (folder / "home").mkdir()
    return make(folder / "repository", folder / "home")
