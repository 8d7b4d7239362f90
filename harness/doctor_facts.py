"""Gathers what ``pairbench doctor`` judges. torch is asked in a process of its own, so that a broken one cannot end
us."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path

from harness.conditions import launch_root
from harness.cpu_watch import own_tree
from harness.environment import pinned
from harness.extras import EXTRAS
from harness.gitfacts import GitFacts, git_facts, package_root
from harness.history.store import default_store
from harness.nvml import GpuIdentity, NoNvml, Nvml, open_nvml, visible_gpus
from harness.provenance import versions

MODULES = tuple(module for extra in EXTRAS.values() for module in extra.modules)
TORCH_LIMIT_S = 120.0
_ASK_TORCH = "import json, torch; print(json.dumps({'cuda': torch.version.cuda, 'gpus': torch.cuda.device_count()}))"


@dataclass(frozen=True)
class Facts:
    """The state of this machine and installation; the defaults are those of a sound one without a GPU."""

    python: tuple[int, int, int] = (3, 12, 0)
    system: str = "Linux"
    in_venv: bool = True
    has_ensurepip: bool = True
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_wants_triton: str | None = None
    torch_error: str | None = None
    torch_bytecode: bool = True  # compiled modules of torch are kept, or can be
    torch_cuda: str | None = None
    torch_gpus: int = 0
    nvml_reason: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None
    gpus: tuple[GpuIdentity, ...] = ()
    visible: tuple[GpuIdentity, ...] = ()
    gpus_on_the_bus: int = 0
    other_processes: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    compiler: str | None = None
    kernels_distribution: str | None = None
    kernels_elsewhere: str | None = None
    root: str = "."
    git: GitFacts = field(default_factory=GitFacts)
    store: str = ""
    store_problem: str | None = None
    free_bytes: int | None = None
    shm_bytes: int | None = None
    modules: frozenset[str] = frozenset()
    model: str | None = None


def gather(environ: Mapping[str, str] | None = None, nvml: Nvml | NoNvml | None = None) -> Facts:
    """The facts of this process's machine; takes as long as importing torch once."""
    env = dict(os.environ if environ is None else environ)
    backend = open_nvml() if nvml is None else nvml
    gpus: tuple[GpuIdentity, ...] = ()
    visible: tuple[GpuIdentity, ...] = ()
    others = 0
    if not isinstance(backend, NoNvml):
        gpus = tuple(backend.gpus())
        visible = tuple(visible_gpus(gpus, env)[0])
        others = _other_processes(backend, visible)
    error, cuda, seen = ask_torch(env)
    place = default_store()
    problem, free = _store(place)
    return Facts(
        python=sys.version_info[:3],
        system=platform.system(),
        in_venv=sys.prefix != sys.base_prefix,
        has_ensurepip=util.find_spec("ensurepip") is not None,
        versions=versions(backend),
        torch_wants_triton=pinned("torch", "triton"),
        torch_error=error,
        torch_bytecode=_bytecode_is_kept(),
        torch_cuda=cuda,
        torch_gpus=seen,
        nvml_reason=backend.reason if isinstance(backend, NoNvml) else None,
        driver=None if isinstance(backend, NoNvml) else backend.driver(),
        driver_cuda=None if isinstance(backend, NoNvml) else backend.cuda(),
        gpus=gpus,
        visible=visible,
        gpus_on_the_bus=gpus_on_the_bus(),
        other_processes=others,
        env=env,
        compiler=find_compiler(env),
        kernels_distribution=_version("kernels"),
        kernels_elsewhere=_kernels_elsewhere(),
        root=str(package_root()),
        git=git_facts(environ=env),
        store=str(place),
        store_problem=problem,
        free_bytes=free,
        shm_bytes=_free(Path("/dev/shm"), total=True),
        modules=frozenset(name for name in MODULES if util.find_spec(name) is not None),
        model=_model(),
    )


def ask_torch(env: Mapping[str, str], python: str = sys.executable) -> tuple[str | None, str | None, int]:
    """Why torch does not import (None when it does), the CUDA it was built for, and how many GPUs it sees."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH],
            capture_output=True,
            text=True,
            env=dict(env),
            timeout=TORCH_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"the import did not end within {TORCH_LIMIT_S:.0f} s", None, 0
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        return (words[-1] if words else f"exit code {done.returncode}")[:300], None, 0
    said = json.loads(done.stdout.splitlines()[-1])
    return None, said["cuda"], int(said["gpus"])


def gpus_on_the_bus(sys_folder: Path = Path("/sys")) -> int:
    """NVIDIA display and compute devices on the PCI bus, whether or not a driver is loaded."""
    count = 0
    for device in sorted((sys_folder / "bus/pci/devices").glob("*")):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def find_compiler(env: Mapping[str, str]) -> str | None:
    """The C++ compiler that torch.compile would use."""
    for name in (env.get("CXX", ""), "c++", "g++", "clang++"):
        found = shutil.which(name, path=env.get("PATH")) if name else None
        if found:
            return found
    return None


def _other_processes(nvml: Nvml, gpus: tuple[GpuIdentity, ...]) -> int:
    ours = own_tree(launch_root())
    pids = {p.pid for gpu in gpus for p in nvml.sample(gpu.index).processes or () if not p.graphics}
    return len(pids - ours)


def _store(place: Path) -> tuple[str | None, int | None]:
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".doctor-"):
            pass
    except OSError as err:
        return err.strerror or str(err), None
    return None, _free(place)


def _free(folder: Path, total: bool = False) -> int | None:
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.total if total else usage.free


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _bytecode_is_kept(package: str = "torch") -> bool:
    """Whether the package's compiled modules are there already, or will be after the first import."""
    spec = util.find_spec(package)
    if spec is None or spec.origin is None:
        return True
    cached = Path(util.cache_from_source(spec.origin))
    if cached.exists():
        return True
    if sys.dont_write_bytecode:
        return False
    nearest = next(folder for folder in cached.parents if folder.exists())
    return os.access(nearest, os.W_OK)


def _kernels_elsewhere() -> str | None:
    """Where ``import kernels`` leads when it is not to our room; None when it is."""
    spec = util.find_spec("kernels")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    ours = package_root() / "kernels"
    if not folders or Path(folders[0]).resolve() == ours.resolve():
        return None
    return folders[0]


def _model() -> str | None:
    try:
        default_model_path = importlib.import_module("impls.model.fetch").default_model_path

        found = default_model_path()
    except ImportError:
        return None
    return str(found) if found is not None else None
