"""What all tests share: the interpreter where there is no GPU, a data folder of their own, skips with a reason."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# Read when a kernel's module is imported, so before any test is collected.
_HAS_GPU = os.path.exists("/dev/nvidiactl")
if not _HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# A box to measure on needs no extras; its GPU tests run without the rooms that do. Elsewhere a lack is an error.
_ROOM_NEEDS = {
    "asv": ("asv", "virtualenv"),
    "dashboard": ("streamlit", "plotly", "duckdb"),
    "history": ("duckdb",),
    "regress": ("duckdb", "ruptures"),
}
collect_ignore = [
    room
    for room, packages in _ROOM_NEEDS.items()
    if _HAS_GPU and any(importlib.util.find_spec(package) is None for package in packages)
]


def pytest_report_header() -> list[str]:
    """Say which rooms are left out, and why."""
    return [f"left out, for want of {' or '.join(_ROOM_NEEDS[room])}: tests/{room}" for room in collect_ignore]


def _gpus() -> int:
    if not _HAS_GPU or importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


@pytest.fixture(scope="session", autouse=True)
def _own_data_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that a test does reaches the user's history, models or ceilings."""
    os.environ["PAIRBENCH_DATA"] = str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; a test that needs it is skipped where it is absent."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the checkout: real traces and noise are not here")
    return folder


@pytest.fixture(scope="session")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one million synthetic records, made once for all that need it; ``PAIRBENCH_MILLION_STORE`` names one
    that was generated before."""
    from harness.history.generate import Shape, generate
    from harness.history.store import Store

    ready = os.environ.get("PAIRBENCH_MILLION_STORE")
    if ready:
        return Path(ready)
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # which all workers of a run have in common
    root = folder / "million" / "store"
    root.parent.mkdir(exist_ok=True)
    with (root.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root.parent / "done").exists():
            assert generate(Store(root), Shape(records=1_000_000), workers=2).records == 1_000_000
            (root.parent / "done").touch()
    return root


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that need GPUs say why they do not run."""
    gpus = _gpus()
    for item in items:
        if item.get_closest_marker("multi_gpu") and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs, has {gpus}"))
        elif item.get_closest_marker("gpu") and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
