"""Each failing state of a machine is told by name, with the command that mends it."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from harness.doctor import Finding, diagnose, version_of
from harness.doctor_facts import Facts, _bytecode_is_kept, ask_torch, find_compiler, gather, gpus_on_the_bus
from harness.extras import CORE, EXTRAS
from harness.gitfacts import GitFacts
from harness.nvml import GpuIdentity, NoNvml

ROOT = Path(__file__).resolve().parents[2]
H200 = GpuIdentity(0, "GPU-aa", "0000:1b:00.0", "NVIDIA H200", 143771 << 20, 700.0, False, True)
TWO = (H200, replace(H200, index=1, uuid="GPU-bb"))
CLEAN = GitFacts("a" * 40, "main", False, "2026-01-01T00:00:00Z", "s", "git", False)
EVERY = {module for extra in EXTRAS.values() for module in extra.modules}
CPU = Facts(
    versions={"torch": "2.13.0+cpu", "triton": "3.7.1"},
    nvml_reason="NVML did not start",
    compiler="/usr/bin/g++",
    git=CLEAN,
    root="/src/pairbench",
    store="/data",
    free_bytes=50 << 30,
    modules=frozenset(EVERY),
    model="/data/model.gguf",
)
GPU = replace(
    CPU,
    versions={"torch": "2.11.0", "triton": "3.6.0"},
    nvml_reason=None,
    torch_cuda="13.0",
    torch_gpus=2,
    driver="580.159",
    driver_cuda="13.0",
    gpus=TWO,
    visible=TWO,
    gpus_on_the_bus=2,
    shm_bytes=64 << 30,
)


@pytest.mark.parametrize("facts", [CPU, GPU], ids=["plain", "two-h200"])
def test_a_sound_machine_has_nothing_to_mend(facts):
    findings = diagnose(facts)
    assert {f.status for f in findings} == {"ok"}
    assert [f for f in findings if f.mend] == []
    assert {"python", "torch", "triton", "gpu", "compiler", "git", "store", "weights"} <= {f.name for f in findings}


def gpu(**changes):
    return (replace(H200, **changes),)


CASES = [
    (CPU, {"python": (3, 10, 4)}, "python", "fail", "3.10.4", "python3.12"),
    (CPU, {"python": (3, 14, 0)}, "python", "fail", "3.14.0", "python3.12"),
    (CPU, {"in_venv": False, "has_ensurepip": False}, "venv", "fail", "ensurepip", "apt install python3-venv"),
    (CPU, {"versions": {}}, "torch", "fail", "not installed", "pip install"),
    (CPU, {"versions": {"torch": "2.10.1", "triton": "3.7.1"}}, "torch", "fail", "2.10.1", ">=2.11,<2.14"),
    (CPU, {"torch_error": "libcudart.so.13: cannot open"}, "torch", "fail", "libcudart", "--force-reinstall"),
    (GPU, {"torch_bytecode": False}, "bytecode", "warn", "compiled anew", "PYTHONPYCACHEPREFIX"),
    (CPU, {"versions": {"torch": "2.13.0"}}, "triton", "fail", "not installed", "triton==3.7"),
    (CPU, {"versions": {"torch": "2.13.0", "triton": "3.9.0"}}, "triton", "fail", "3.9.0", "triton==3.7"),
    (CPU, {"versions": {"torch": "2.13.0", "triton": "3.6.0"}}, "triton", "warn", "goes with", "triton==3.7"),
    (CPU, {"torch_wants_triton": "3.8.2"}, "triton", "warn", "3.8.2", 'triton==3.8.2"'),
    (CPU, {"system": "Darwin"}, "triton", "warn", "Darwin", None),
    (CPU, {"env": {"TRITON_INTERPRET": "1"}}, "interpreter", "warn", "never timed", "unset TRITON_INTERPRET"),
    (GPU, {"env": {"TRITON_INTERPRET": "1"}}, "interpreter", "fail", "never timed", "unset TRITON_INTERPRET"),
    (CPU, {"gpus_on_the_bus": 2}, "nvml", "fail", "2 NVIDIA", "driver"),
    (
        CPU,
        {"gpus_on_the_bus": 1, "nvml_reason": "the package nvidia-ml-py is not installed"},
        "nvml",
        "fail",
        "energy",
        "pip install nvidia-ml-py",
    ),
    (
        GPU,
        {"visible": (), "env": {"CUDA_VISIBLE_DEVICES": ""}},
        "gpu",
        "fail",
        "hides all 2",
        "unset CUDA_VISIBLE_DEVICES",
    ),
    (GPU, {"versions": {"torch": "2.13.0+cpu", "triton": "3.7.1"}}, "gpu", "fail", "CPU build", "TORCH_ARGS"),
    (GPU, {"torch_gpus": 0}, "gpu", "fail", "torch sees no GPU", "nvidia-smi"),
    (GPU, {"driver": "550.54", "driver_cuda": "12.4"}, "driver", "fail", "12.4 at most", "580 or newer"),
    (GPU, {"driver_cuda": "13.0", "torch_cuda": "13.2"}, "driver", "warn", "newer than", "update"),
    (GPU, {"visible": gpu(mig=True)}, "mig", "warn", "MIG", "-mig 0"),
    (GPU, {"visible": gpu(ecc=False)}, "ecc", "warn", "ECC", "-e 1"),
    (GPU, {"visible": gpu(name="NVIDIA H999")}, "peaks", "warn", "H999", "device_table.py"),
    (GPU, {"visible": gpu(power_limit_w=500.0)}, "power", "warn", "500 W", "-pl 700"),
    (GPU, {"gpus": (H200, replace(H200, name="NVIDIA L4"))}, "order", "warn", "several types", "PCI_BUS_ID"),
    (GPU, {"other_processes": 1}, "contention", "warn", "unsettled", "nvidia-smi"),
    (GPU, {"shm_bytes": 64 << 20}, "shm", "warn", "64 MiB", "--shm-size"),
    (CPU, {"compiler": None}, "compiler", "warn", "torch.compile", "apt install g++"),
    (CPU, {"kernels_distribution": "0.11.0"}, "kernels", "fail", "Hugging Face", "pip uninstall -y kernels"),
    (CPU, {"kernels_elsewhere": "/site/kernels"}, "kernels", "fail", "/site/kernels", "pip uninstall -y kernels"),
    (
        CPU,
        {"git": replace(CLEAN, dirty=True, changed=("a.py",))},
        "git",
        "warn",
        "differs (a.py)",
        "git reset FETCH_HEAD",
    ),
    (CPU, {"git": replace(CLEAN, shallow=True)}, "git", "warn", "shallow", "git fetch --unshallow"),
    (
        CPU,
        {"git": GitFacts("a", source="files", reason="git is not installed, so that nothing shows")},
        "git",
        "warn",
        "not installed",
        "apt install git",
    ),
    (
        CPU,
        {"git": GitFacts("a", source="files", reason="git ls-files: fatal: detected dubious ownership")},
        "git",
        "warn",
        "dubious",
        "safe.directory /src/pairbench",
    ),
    (CPU, {"git": GitFacts(reason="in no git repository")}, "git", "warn", "no git", "PAIRBENCH_COMMIT"),
    (CPU, {"store_problem": "Read-only file system"}, "store", "fail", "/data", "PAIRBENCH_DATA"),
    (CPU, {"free_bytes": 1 << 30}, "disk", "warn", "1024 MiB", "PAIRBENCH_DATA"),
    (CPU, {"free_bytes": 1 << 20}, "disk", "fail", "1 MiB", "PAIRBENCH_DATA"),
    *(
        (CPU, {"modules": frozenset(EVERY - {extra.modules[-1]})}, "extras", "warn", extra.modules[-1], f"[{name}]")
        for name, extra in EXTRAS.items()
    ),
    (CPU, {"model": None}, "weights", "warn", "no real weights", "pairbench models fetch"),
]


@pytest.mark.parametrize(("base", "change", "name", "status", "word", "mend"), CASES)
def test_each_fault_is_named_with_what_mends_it(base, change, name, status, word, mend):
    findings = diagnose(replace(base, **change))
    (found,) = [f for f in findings if f.name == name and f.status != "ok"]
    assert found.status == status
    assert word in found.message
    assert (mend is None) == (found.mend is None)
    assert mend is None or mend in (found.mend or "")


def test_a_fault_raises_no_false_alarm_elsewhere():
    for base, change, name, *_ in CASES:
        amiss = {f.name for f in diagnose(replace(base, **change)) if f.status != "ok"}
        # Without torch its Triton is missing too, and a CPU build on a GPU box is told once.
        assert amiss - {name} <= ({"triton"} if name == "torch" else set()), (name, amiss)


def test_every_extra_of_the_project_is_listed_by_its_own_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    called = {"pytest-xdist": "xdist", "nvidia-ml-py": "pynvml"}  # whose modules have another name
    for extra, needs in project["optional-dependencies"].items():
        names = [re.match(r"[A-Za-z0-9-]+", need)[0] for need in needs if not need.startswith("pairbench[")]
        assert {called.get(name, name).replace("-", "_") for name in names} == set(EXTRAS[extra].modules)
    core = [re.match(r"[A-Za-z0-9-]+", need)[0] for need in project["dependencies"]]
    assert [called.get(name, name) for name in core] == list(CORE)
    said = [f.message for f in diagnose(CPU) if f.name == "extras"]
    assert [next(e for e in EXTRAS if f"{e!r}" in message) for message in said] == list(
        project["optional-dependencies"]
    )


def test_many_gpus_without_trouble_are_counted():
    (found,) = [f for f in diagnose(GPU) if f.name == "gpu"]
    assert found.message == "2 visible: NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13)), ("13.0", (13, 0)), ("3.6", (3, 6)), ("3.7.*", (3, 7)), ("x", (0, 0))]
)
def test_versions(text, version):
    assert version_of(text) == version


def test_this_machine_is_diagnosed(monkeypatch, tmp_path):
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path))
    facts = gather(nvml=NoNvml("none here"))
    assert facts.torch_error is None
    assert facts.store_problem is None
    assert not list((tmp_path / "history").iterdir())
    findings = diagnose(facts)
    assert all(isinstance(f, Finding) and f.message for f in findings)
    assert all(f.mend for f in findings if f.status == "fail")


def test_a_store_that_cannot_be_written_is_seen(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path / "file"))
    monkeypatch.setattr("harness.doctor_facts.ask_torch", lambda _env: (None, None, 0))
    assert gather(nvml=NoNvml("none")).store_problem


def test_a_torch_that_does_not_import_is_reported_in_its_own_words(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    error, cuda, gpus = ask_torch({"PYTHONPATH": str(tmp_path)})
    assert "libcudart.so.13" in (error or "")
    assert (cuda, gpus) == (None, 0)


def test_gpus_are_counted_on_the_bus_without_a_driver(tmp_path):
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x0c0330"), ("c", "0x8086", "0x030000")):
        folder = tmp_path / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    assert gpus_on_the_bus(tmp_path) == 1
    assert gpus_on_the_bus(tmp_path / "none") == 0


def test_the_compiler_is_the_one_that_torch_compile_would_use(tmp_path):
    for name in ("g++", "mycxx"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert find_compiler({"PATH": str(tmp_path)}) == str(tmp_path / "g++")
    assert find_compiler({"PATH": str(tmp_path), "CXX": "mycxx"}) == str(tmp_path / "mycxx")
    assert find_compiler({"PATH": str(tmp_path / "none")}) is None


def test_whether_modules_are_compiled_anew_each_time(tmp_path, monkeypatch):
    (tmp_path / "made_up_package.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert not _bytecode_is_kept("made_up_package")
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    assert _bytecode_is_kept("made_up_package")
    __import__("made_up_package")
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    assert _bytecode_is_kept("made_up_package"), "what is there is used, whether or not more may be written"
    assert _bytecode_is_kept("no_such_package_at_all")
