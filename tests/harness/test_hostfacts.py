"""CPU, cores and memory that this process may use, from faked /proc and control groups."""

import os

import pytest

from harness.hostfacts import cores_allowed, cpu_model, machine_label, memory_bytes


@pytest.fixture
def proc(tmp_path):
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\n\nprocessor\t: 1\n")
    (folder / "meminfo").write_text("MemTotal:       1048576 kB\nMemFree: 5 kB\n")
    (folder / "self" / "cgroup").write_text("0::/pod/job\n")
    return folder


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


def test_the_label_is_declared_or_the_hosts_name():
    assert machine_label({"PAIRBENCH_MACHINE": "node7"}) == "node7"
    assert machine_label({"PAIRBENCH_MACHINE": " "})


def test_cpu_models(proc):
    assert cpu_model(proc) == "AMD EPYC 9654 96-Core Processor"
    (proc / "cpuinfo").write_text("processor: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n")
    assert cpu_model(proc).endswith("0x41-0xd4f")
    assert cpu_model(proc / "absent")


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)]
)
def test_a_cgroup_quota_cuts_the_cores(proc, tmp_path, eight_cores, quota, cores):
    job = tmp_path / "cg" / "pod" / "job"
    job.mkdir(parents=True)
    (job / "cpu.max").write_text(quota + "\n")
    assert cores_allowed(proc, tmp_path / "cg") == cores


def test_a_quota_of_a_group_above_counts_too(proc, tmp_path, eight_cores):
    (tmp_path / "cg" / "pod" / "job").mkdir(parents=True)
    (tmp_path / "cg" / "pod" / "cpu.max").write_text("200000 100000\n")
    assert cores_allowed(proc, tmp_path / "cg") == 2


def test_version_one_groups(proc, tmp_path, eight_cores):
    (proc / "self" / "cgroup").write_text("4:memory:/m\n3:cpu,cpuacct:/c\n")
    cpu = tmp_path / "cg" / "cpu,cpuacct" / "c"
    cpu.mkdir(parents=True)
    (cpu / "cpu.cfs_quota_us").write_text("150000\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    memory = tmp_path / "cg" / "memory"
    memory.mkdir(parents=True)
    (memory / "memory.limit_in_bytes").write_text(f"{9223372036854771712}\n")
    assert cores_allowed(proc, tmp_path / "cg") == 2
    assert memory_bytes(proc, tmp_path / "cg") == 1 << 30
    (memory / "m").mkdir()
    (memory / "m" / "memory.limit_in_bytes").write_text("1000\n")
    assert memory_bytes(proc, tmp_path / "cg") == 1000


def test_affinity_alone_and_no_files_at_all(tmp_path, eight_cores):
    assert cores_allowed(tmp_path / "none", tmp_path / "none") == 8
    assert (memory_bytes(tmp_path / "none", tmp_path / "none") or 0) > 1 << 20
