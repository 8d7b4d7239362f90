"""A torch that the user brings stays: pip's constraints are made to fit it, and a venv's packages can be borrowed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.environment import borrow, constraints

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def _pins(made: list[str]) -> dict[str, str]:
    found = [line.partition(";")[0].split("==") for line in made if line.strip() and not line.startswith("#")]
    return {name.lower(): version.strip() for name, version in found}


@pytest.mark.parametrize(
    ("installed", "torch_wants", "brought"),
    [
        ({}, None, {}),
        ({"torch": "2.11.0", "triton": "3.6.0"}, "3.6.0", {"torch": "2.11.0", "triton": "3.6.0"}),
        ({"torch": "2.11.0+cu130"}, "3.6.0", {"torch": "2.11.0+cu130", "triton": "3.6.0"}),
        ({"torch": "2.11.0+cpu"}, None, {"torch": "2.11.0+cpu", "triton": "3.6.*"}),
        ({"torch": "2.12.0"}, None, {"torch": "2.12.0"}),
        ({"triton": "3.8.0"}, None, {"triton": "3.8.0"}),
    ],
)
def test_what_was_brought_takes_the_place_of_the_pins(
    installed: dict[str, str], torch_wants: str | None, brought: dict[str, str]
) -> None:
    made = _pins(list(constraints(LINES, installed, torch_wants)))
    assert {name: made.pop(name) for name in ("torch", "triton") if name in made} == brought
    rest = _pins(LINES)
    del rest["triton"]
    assert made == rest


def test_packages_that_only_begin_like_torch_keep_their_pins() -> None:
    assert list(constraints(["torchmetrics==1", "Torch==1", "triton ==3 ; x"], {})) == ["torchmetrics==1"]


def _venv(folder: Path, python: str = sys.executable, *options: str) -> Path:
    subprocess.run([python, "-m", "venv", *options, str(folder)], check=True, capture_output=True)
    return folder / "bin" / "python"


def _packages(python: Path) -> Path:
    asked = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip())


def _fake(site: Path, name: str, version: str, requires: str = "") -> None:
    (site / name).mkdir()
    (site / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
    info = site / f"{name}-{version}.dist-info"
    info.mkdir()
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n")


@pytest.fixture(scope="module")
def has_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment's Python that has a torch of its own, one that is found through a file of paths."""
    python = _venv(tmp_path_factory.mktemp("has"), sys.executable, "--without-pip")
    site = _packages(python)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    _fake(elsewhere, "torch", "2.11.0", "triton==3.6.0")
    _fake(site, "triton", "3.6.0")
    (site / "linked.pth").write_text(f"{elsewhere}\n")
    return python


def test_the_packages_of_a_venv_are_seen_after_ones_own(has_torch: Path, tmp_path: Path) -> None:
    python = _venv(tmp_path / "new", str(has_torch), "--system-site-packages", "--without-pip")
    site = _packages(python)
    asked = "import importlib.metadata as m; import torch, triton; print(torch.__version__, m.version('triton'))"
    before = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False)
    assert before.returncode != 0
    assert borrow(str(has_torch), site) == [str(_packages(has_torch))]
    seen = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["2.11.0", "3.6.0"]
    (site / "torch").mkdir()
    (site / "torch" / "__init__.py").write_text("__version__ = 'own'\n")
    own = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    assert own.stdout.split()[0] == "own"


def test_a_python_outside_of_venvs_is_borrowed_by_the_systems_own_way(tmp_path: Path) -> None:
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    if not base.exists():
        pytest.skip(f"{base} is not there")
    assert borrow(str(base), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def _make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "PYTHONPATH"}
    command = ["make", "-C", str(ROOT), f"VENV={folder}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=clean, timeout=200, check=False)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_holds_pip_to_the_torch_of_a_venv_and_keeps_to_the_choice(has_torch: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    mine = ("SYSTEM_TORCH=1", f"PYTHON={has_torch}")
    done = _make(venv, str(venv / "constraints.txt"), *mine)
    assert done.returncode == 0, done.stdout + done.stderr
    pins = _pins((venv / "constraints.txt").read_text().splitlines())
    assert (pins["torch"], pins["triton"]) == ("2.11.0", "3.6.0")
    for target in ("bench", "test"):  # every call of pip is held to those
        calls = [x for x in _make(venv, "-n", target, *mine).stdout.splitlines() if "pip install" in x]
        assert calls
        assert all(f"-c {venv / 'constraints.txt'}" in call for call in calls)
        assert not any("torch==" in call for call in calls)
    other = _make(venv, "choice", "TORCH_ARGS=torch==2.13.1")
    assert other.returncode == 2
    assert "make clean" in other.stdout
    assert _make(venv, "choice").returncode == 0  # no wish, no quarrel


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_says_so_when_the_python_named_has_no_torch(tmp_path: Path) -> None:
    bare = _venv(tmp_path / "bare", sys.executable, "--without-pip")
    done = _make(tmp_path / "venv", str(tmp_path / "venv" / ".torch"), "SYSTEM_TORCH=1", f"PYTHON={bare}")
    assert done.returncode == 2
    assert str(bare) in done.stdout
    assert not (tmp_path / "venv" / ".torch").exists()
