"""What is missing, clashing or misconfigured here, each with the command that mends it.

Every check is a function of :class:`harness.doctor_facts.Facts`, which are gathered once and can be made up in tests.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from harness.devices import lookup
from harness.doctor_facts import Facts, gather
from harness.environment import TRITON_OF
from harness.extras import EXTRAS, install

PYTHON, TORCH, TRITON = ((3, 11), (3, 14)), ((2, 11), (2, 14)), ((3, 6), (3, 9))
#: CUDA major → the oldest Linux driver that runs it (CUDA toolkit release notes, minor version compatibility).
DRIVER_OF = {12: 525, 13: 580}
FREE_WARN, FREE_FAIL, SHM_LEAST = 2 << 30, 100 << 20, 1 << 30
OFF = ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Finding:
    """One check: ``fail`` stops measuring or spoils it, ``warn`` takes something away, ``ok`` is said for the
    record."""

    name: str
    status: Literal["ok", "warn", "fail"]
    message: str
    mend: str | None = None


Check = Callable[[Facts], Iterator[Finding]]


def diagnose(facts: Facts | None = None) -> list[Finding]:
    """Every check, in an order that mends causes before their consequences."""
    known = gather() if facts is None else facts
    return [finding for check in CHECKS for finding in check(known)]


def version_of(text: str) -> tuple[int, int]:
    """Major and minor of a version such as ``2.13.0+cpu``; zero for what is no number."""
    parts = [*text.split("+")[0].split("."), "0", "0"]
    major, minor = (int(p) if p.isdigit() else 0 for p in parts[:2])
    return major, minor


def _span(bounds: tuple[tuple[int, int], tuple[int, int]]) -> str:
    (a, b), (c, d) = bounds
    return f">={a}.{b},<{c}.{d}"


def python(f: Facts) -> Iterator[Finding]:
    """The interpreter's version, and whether it can make a virtual environment."""
    has = ".".join(str(n) for n in f.python)
    if PYTHON[0] <= f.python[:2] < PYTHON[1]:
        yield Finding("python", "ok", f"Python {has}")
    else:
        message = f"Python {has} is outside {_span(PYTHON)}"
        yield Finding("python", "fail", message, "install Python 3.12, then make PYTHON=python3.12 bench")
    if not f.in_venv and not f.has_ensurepip:
        message = "python3 -m venv fails here, since ensurepip is missing, and leaves half an environment behind"
        yield Finding("venv", "fail", message, "apt install python3-venv && rm -rf .venv")


def torch(f: Facts) -> Iterator[Finding]:
    """torch is there, of a version that the code runs with, and imports."""
    has = f.versions.get("torch")
    wanted = f'pip install "torch{_span(TORCH)}"'
    if has is None:
        yield Finding("torch", "fail", "torch is not installed", wanted)
    elif not TORCH[0] <= version_of(has) < TORCH[1]:
        yield Finding("torch", "fail", f"torch {has} is outside {_span(TORCH)}", wanted)
    elif f.torch_error:
        yield Finding("torch", "fail", f"torch {has} does not import: {f.torch_error}", f"{wanted} --force-reinstall")
    else:
        yield Finding("torch", "ok", f"torch {has}")


def bytecode(f: Facts) -> Iterator[Finding]:
    """Python keeps what it compiles: a measuring process imports torch and its compiler, thousands of modules."""
    if not f.torch_bytecode:
        message = "torch's modules are compiled anew by every process, which takes longer than measuring does"
        mend = "unset PYTHONDONTWRITEBYTECODE; where torch's folder is read-only: export PYTHONPYCACHEPREFIX=FOLDER"
        yield Finding("bytecode", "warn", message, mend)


def triton(f: Facts) -> Iterator[Finding]:
    """Triton is there, of a version that the code runs with, and the one that goes with this torch."""
    if f.system != "Linux":
        yield Finding("triton", "warn", f"there is no Triton for {f.system}: Triton kernels are skipped")
        return
    has, torch_has = f.versions.get("triton"), f.versions.get("torch")
    torch_version = version_of(torch_has) if torch_has else None
    near = TRITON_OF.get(torch_version) if torch_version else None
    pin = f.torch_wants_triton or (f"{near[0]}.{near[1]}.*" if near else None)
    mend = f'pip install "triton=={pin}"' if pin else f'pip install "triton{_span(TRITON)}"'
    if has is None:
        yield Finding("triton", "fail", "Triton is not installed: its kernels cannot run", mend)
    elif not TRITON[0] <= version_of(has) < TRITON[1]:
        yield Finding("triton", "fail", f"Triton {has} is outside {_span(TRITON)}", mend)
    elif pin and version_of(has) != version_of(pin):
        message = f"torch {torch_has} goes with Triton {pin}, {has} is installed: torch.compile may break"
        yield Finding("triton", "warn", message, mend)
    else:
        yield Finding("triton", "ok", f"Triton {has}")


def interpreter(f: Facts) -> Iterator[Finding]:
    """Whether kernels are interpreted, which nobody wants where there is a GPU."""
    if f.env.get("TRITON_INTERPRET", "").lower() not in OFF:
        message = "TRITON_INTERPRET is set: kernels are interpreted, for correctness only, and never timed"
        yield Finding("interpreter", "fail" if f.gpus else "warn", message, "unset TRITON_INTERPRET")


def gpu(f: Facts) -> Iterator[Finding]:
    """NVML, the driver and torch agree on the GPUs."""
    hidden = f.env.get("CUDA_VISIBLE_DEVICES")
    if f.nvml_reason is not None and f.gpus_on_the_bus:
        package = "nvidia-ml-py is not" in f.nvml_reason
        message = f"{f.gpus_on_the_bus} NVIDIA GPU(s) on the bus, but {f.nvml_reason}"
        mend = "pip install nvidia-ml-py" if package else "install the NVIDIA driver, or docker run --gpus all"
        yield Finding("nvml", "fail", f"{message}: no clocks, throttling or energy", mend)
    elif f.nvml_reason is not None:
        yield Finding("gpu", "ok", f"no NVIDIA GPU ({f.nvml_reason}): techniques run on the CPU")
        return
    if not f.gpus:
        return
    names = ", ".join(sorted({g.name for g in f.gpus}))
    if hidden is not None and not f.visible:
        message = f"CUDA_VISIBLE_DEVICES={hidden!r} hides all {len(f.gpus)} GPUs ({names})"
        yield Finding("gpu", "fail", message, "unset CUDA_VISIBLE_DEVICES")
    elif f.versions.get("torch", "").endswith("+cpu"):
        message = f"{len(f.gpus)} GPU(s) ({names}), but torch is a CPU build"
        yield Finding("gpu", "fail", message, "name a CUDA build: rm -rf .venv && make bench TORCH_ARGS=…")
    elif f.torch_gpus == 0:
        yield Finding("gpu", "fail", f"the driver shows {names}, but torch sees no GPU", "nvidia-smi; see driver below")
    else:
        yield Finding("gpu", "ok", f"{len(f.visible)} visible: {names}")


def driver(f: Facts) -> Iterator[Finding]:
    """The driver runs the CUDA version that torch is built for."""
    if not f.gpus or f.torch_cuda is None or f.driver_cuda is None:
        return
    need, have = version_of(f.torch_cuda), version_of(f.driver_cuda)
    if need[0] > have[0]:
        least = DRIVER_OF.get(need[0])
        message = f"torch is built for CUDA {f.torch_cuda}, the driver {f.driver} runs CUDA {f.driver_cuda} at most"
        update = f"update the NVIDIA driver to {least} or newer" if least else "update the NVIDIA driver"
        yield Finding("driver", "fail", message, f"{update}, or bring a torch for CUDA {have[0]} with TORCH_ARGS")
    elif need > have:
        message = f"torch's CUDA {f.torch_cuda} is newer than the driver's {f.driver_cuda}: some kernels may not load"
        yield Finding("driver", "warn", message, "update the NVIDIA driver")
    else:
        yield Finding("driver", "ok", f"driver {f.driver} (CUDA {f.driver_cuda}) runs torch's CUDA {f.torch_cuda}")


def gpu_state(f: Facts) -> Iterator[Finding]:
    """What makes the figures of a visible GPU differ from its data sheet's, or from run to run."""
    for g in f.visible:
        where = f"GPU {g.index} ({g.name})"
        if g.mig:
            message = f"{where} is split by MIG: no datasheet describes a slice, so that there is no MFU"
            yield Finding("mig", "warn", message, f"nvidia-smi -i {g.index} -mig 0 (as root, with the GPU idle)")
        if g.ecc is False:
            message = f"{where} runs without ECC: its memory is faster than that of others of its type"
            yield Finding("ecc", "warn", message, f"nvidia-smi -i {g.index} -e 1 (as root), then reboot")
        row = lookup(g.name, g.memory_bytes, mig=g.mig)
        if row.device is None and not g.mig:
            yield Finding(
                "peaks", "warn", f"{row.reason}: no MFU", "add a row with its source to harness/device_table.py"
            )
        elif row.device is not None and g.power_limit_w is not None and g.power_limit_w < 0.95 * row.device.power:
            message = f"{where} is limited to {g.power_limit_w:.0f} W, its board allows {row.device.power:.0f} W"
            yield Finding("power", "warn", message, f"nvidia-smi -i {g.index} -pl {row.device.power:.0f} (as root)")
    if len({g.name for g in f.gpus}) > 1 and f.env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        message = "GPUs of several types: torch's order may not be the driver's, and the wrong one would be named"
        yield Finding("order", "warn", message, "export CUDA_DEVICE_ORDER=PCI_BUS_ID")
    if f.other_processes:
        message = f"{f.other_processes} other process(es) on the visible GPUs: measurements will be unsettled"
        yield Finding("contention", "warn", message, "nvidia-smi, then end them or choose by CUDA_VISIBLE_DEVICES")
    if len(f.visible) > 1 and f.shm_bytes is not None and f.shm_bytes < SHM_LEAST:
        message = f"/dev/shm has {f.shm_bytes >> 20} MiB: NCCL between {len(f.visible)} GPUs may run out of it"
        yield Finding("shm", "warn", message, "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm")


def compiler(f: Facts) -> Iterator[Finding]:
    """A C++ compiler, which torch.compile needs."""
    if f.compiler is None:
        message = "no C++ compiler: torch.compile variants are skipped"
        yield Finding("compiler", "warn", message, "apt install g++ (or set CXX)")
    else:
        yield Finding("compiler", "ok", f.compiler)


def kernels_package(f: Facts) -> Iterator[Finding]:
    """No other package takes the name of our kernels."""
    if f.kernels_elsewhere is not None:
        message = f"'import kernels' finds {f.kernels_elsewhere}, not ours"
        yield Finding("kernels", "fail", message, "pip uninstall -y kernels, and run from the checkout")
    elif f.kernels_distribution is not None:
        message = f"the package kernels {f.kernels_distribution} (Hugging Face) has the name of our kernels/ room"
        yield Finding("kernels", "fail", message, "pip uninstall -y kernels")


def git(f: Facts) -> Iterator[Finding]:
    """Whose commit the records are going to be, and whether its tree is clean."""
    facts = f.git
    reason = facts.reason or ""
    if facts.source in ("asv", "git"):
        if facts.shallow:
            message = "the clone is shallow: the history cannot be put in the order of commits"
            yield Finding("git", "warn", message, "git fetch --unshallow")
        elif facts.dirty:
            changed = ", ".join(facts.changed[:3]) + (", …" if len(facts.changed) > 3 else "")
            message = f"commit {(facts.commit or '')[:12]}, but the tree differs ({changed or facts.reason})"
            mend = "commit first; where files are newer than their .git: git fetch BUNDLE main && git reset FETCH_HEAD"
            yield Finding("git", "warn", f"{message}: its records are no baseline", mend)
        else:
            yield Finding("git", "ok", f"commit {(facts.commit or '')[:12]}")
    elif "not installed" in reason:
        yield Finding("git", "warn", f"{reason}: records cannot be baselines", "apt install git")
    elif "dubious ownership" in reason:
        mend = f"git config --global --add safe.directory {f.root}"
        yield Finding("git", "warn", f"{reason}: records cannot be baselines", mend)
    elif facts.declared:
        yield Finding("git", "ok", f"no repository; commit {(facts.commit or '')[:12]} is declared")
    else:
        mend = "export PAIRBENCH_COMMIT=… PAIRBENCH_BRANCH=… PAIRBENCH_DATE=… PAIRBENCH_DIRTY=0"
        yield Finding("git", "warn", reason or "the commit is not known", mend)


def store(f: Facts) -> Iterator[Finding]:
    """The user's own history can be written, and there is room for it."""
    if f.store_problem is not None:
        yield Finding(
            "store", "fail", f"{f.store} cannot be written: {f.store_problem}", "export PAIRBENCH_DATA=FOLDER"
        )
    elif f.free_bytes is not None and f.free_bytes < FREE_WARN:
        status: Literal["warn", "fail"] = "fail" if f.free_bytes < FREE_FAIL else "warn"
        message = f"{f.free_bytes >> 20} MiB free at {f.store}"
        yield Finding("disk", status, message, "free some space, or export PAIRBENCH_DATA=FOLDER elsewhere")
    else:
        yield Finding("store", "ok", f"{f.store} can be written")


def extras(f: Facts) -> Iterator[Finding]:
    """Optional packages and real weights."""
    for name, extra in EXTRAS.items():
        missing = [module for module in extra.modules if module not in f.modules]
        if missing:
            message = f"the extra {name!r} lacks {', '.join(missing)}: it is for {extra.purpose}"
            yield Finding("extras", "warn", message, install(name))
        else:
            yield Finding("extras", "ok", f"the extra {name!r} is here: {extra.purpose}")
    if f.model is None:
        message = "no real weights: techniques that need them are skipped"
        yield Finding("weights", "warn", message, "pairbench models fetch")
    else:
        yield Finding("weights", "ok", f.model)


CHECKS: tuple[Check, ...] = (
    python,
    torch,
    bytecode,
    triton,
    interpreter,
    gpu,
    driver,
    gpu_state,
    compiler,
    kernels_package,
    git,
    store,
    extras,
)
