"""Throttled, contended or fit: from a faked NVML, with process trees that are real or faked."""

import json
import os

import pytest

from harness.conditions import (
    BlindWatch,
    GpuWatch,
    HostWatch,
    decode_reasons,
    launch_root,
    watch_device,
)
from harness.cpu_watch import CpuWatch
from harness.nvml import GpuIdentity, GpuProcess, GpuSample, NoNvml

H200 = GpuIdentity(3, "GPU-aa", "0000:1b:00.0", "NVIDIA H200", 143771 << 20, 700.0)
OURS = GpuProcess(os.getpid(), 5 << 30)


def sample(**changes):
    base = {
        "sm_mhz": 1980,
        "memory_mhz": 3201,
        "temperature_c": 50,
        "power_w": 600.0,
        "reasons": 0,
        "energy_j": 100.0,
        "processes": (OURS,),
    }
    return GpuSample(**{**base, **changes})


class FakeNvml:
    def __init__(self, *samples):
        self._samples, self.asked = list(samples), []

    def driver(self):
        return "580"

    def cuda(self):
        return "13.0"

    def gpus(self):
        return [H200]

    def sample(self, index):
        self.asked.append(index)
        return self._samples.pop(0)


def conditions(*samples, **options):
    nvml = FakeNvml(*samples)
    watch = GpuWatch(nvml, H200, CpuWatch(), **options)
    watch.start()
    for _ in samples[2:]:
        watch.poke()
    found = watch.stop()
    assert nvml.asked == [3] * len(samples)
    json.dumps(found.as_record(), allow_nan=False)
    return found


def test_a_quiet_gpu_disturbs_nothing():
    found = conditions(sample(temperature_c=45), sample(sm_mhz=1755, energy_j=350.0))
    assert found.disturbed is False
    assert found.energy_j == 250.0
    assert found.device_memory_bytes == 5 << 30
    record = found.as_record()
    assert record["sm_mhz"] == {"min": 1755, "max": 1980, "last": 1755}
    assert record["temperature_c"] == {"min": 45, "max": 50, "last": 50}
    assert (record["available"], record["why"], record["power_capped"]) == (True, [], False)


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (0x08, "hw_slowdown"),
        (0x20, "sw_thermal_slowdown"),
        (0x40, "hw_thermal_slowdown"),
        (0x80, "hw_power_brake_slowdown"),
        (0x48, "hw_thermal_slowdown"),
    ],
)
def test_slowdowns_throttle_whenever_they_are_seen(mask, name):
    for samples in ([sample(reasons=mask), sample()], [sample(), sample(), sample(reasons=mask)]):
        found = conditions(*samples)
        assert found.throttled is True
        assert name in found.why[0]
        assert name in found.facts["clock_reasons"]


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x4, 0x10, 0x100, 0x200])
def test_other_reasons_are_recorded_and_do_not_throttle(mask):
    found = conditions(sample(), sample(reasons=mask))
    assert found.throttled is False
    assert found.facts["clock_reasons"] == decode_reasons(mask)
    assert found.facts["power_capped"] is (mask == 0x4)


def test_reasons_are_decoded_bit_by_bit():
    assert decode_reasons(0x44) == ["sw_power_cap", "hw_thermal_slowdown"]
    assert decode_reasons(0x400) == ["bit_0x400"]
    assert decode_reasons(0) == []


def test_a_stranger_on_the_gpu_contends():
    found = conditions(sample(), sample(processes=(OURS, GpuProcess(1 << 22, 1))))
    assert found.contended is True
    assert str(1 << 22) in found.why[0]
    assert found.facts["other_processes"] == 1


def test_a_desktop_that_only_draws_does_not():
    assert conditions(sample(), sample(processes=(OURS, GpuProcess(1 << 22, 1, graphics=True)))).contended is False


def test_parents_of_ours_are_ours():
    parent = GpuProcess(os.getppid(), 1)
    assert conditions(sample(processes=(parent,)), sample(processes=(parent, OURS))).contended is False


def test_in_a_container_as_many_unknown_ids_are_ours_as_we_hold_contexts():
    foreign = tuple(GpuProcess(pid) for pid in (5_000_001, 5_000_002))
    assert conditions(sample(processes=foreign[:1]), sample(processes=foreign[:1])).contended is False
    assert conditions(sample(processes=foreign), sample(processes=foreign)).contended is True
    assert conditions(sample(processes=foreign), sample(processes=foreign), contexts=2).contended is False


def test_what_the_driver_does_not_say_is_none_and_blames_nobody():
    blank = GpuSample()
    found = conditions(blank, blank)
    assert found.disturbed is False
    assert found.energy_j is None
    assert found.facts["sm_mhz"] is None
    assert found.facts["processes_known"] is False


def test_a_counter_of_energy_that_was_reset_gives_none():
    assert conditions(sample(energy_j=900.0), sample(energy_j=10.0)).energy_j is None


def test_a_watch_can_be_used_again_and_not_stopped_twice():
    watch = GpuWatch(FakeNvml(sample(reasons=8), sample(), sample(), sample()), H200, CpuWatch())
    watch.start()
    assert watch.stop().throttled is True
    watch.start()
    assert watch.stop().throttled is False
    with pytest.raises(RuntimeError, match="before it was started"):
        watch.stop()


def test_without_nvml_the_conditions_say_so():
    watch = watch_device("cuda:0", nvml=NoNvml("library not found"))
    assert isinstance(watch, BlindWatch)
    watch.start()
    watch.poke()
    found = watch.stop()
    assert (found.available, found.reason, found.disturbed) == (False, "library not found", False)
    json.dumps(found.as_record(), allow_nan=False)


def test_the_gpu_that_torch_uses_is_watched():
    assert isinstance(watch_device("cuda:0", nvml=FakeNvml(), environ={}), GpuWatch)
    hidden = watch_device("cuda:0", nvml=FakeNvml(), environ={"CUDA_VISIBLE_DEVICES": ""})
    assert isinstance(hidden, BlindWatch)
    hidden.start()
    assert "visible" in (hidden.stop().reason or "")


def test_the_cpu_is_watched_through_proc():
    watch = watch_device("cpu")
    assert isinstance(watch, HostWatch)
    watch.start()
    watch.poke()
    record = watch.stop().as_record()
    assert record["available"] is True
    assert record["host"]["cores"] >= 1
    json.dumps(record, allow_nan=False)


def test_the_launch_is_found_from_any_of_its_ranks(tmp_path):
    def process(pid, parent, environ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) S {parent} " + "0 " * 20)
        (folder / "environ").write_bytes(environ)

    process(50, 40, b"HOME=/\0")  # the launcher
    process(40, 1, b"HOME=/\0")
    process(60, 50, b"A=1\0PAIRBENCH_LAUNCH=x\0")  # rank 0
    process(61, 60, b"PAIRBENCH_LAUNCH=x\0")  # its child
    process(70, 1, b"PAIRBENCH_LAUNCH=y\0")  # an orphan of a launcher that died
    assert launch_root(tmp_path, 61) == 50
    assert launch_root(tmp_path, 60) == 50
    assert launch_root(tmp_path, 50) == 50
    assert launch_root(tmp_path, 70) == 70


def test_the_supervisors_of_one_host_in_a_joined_world_are_no_strangers(tmp_path):
    def process(pid, parent, environ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} (python) S {parent} " + "0 " * 20)
        (folder / "environ").write_bytes(environ)

    process(30, 1, b"HOME=/\0")  # torchrun
    for rank, supervisor in (("0", 40), ("1", 41)):
        process(supervisor, 30, f"RANK={rank}\0WORLD_SIZE=2\0".encode())
        process(supervisor + 10, supervisor, f"RANK={rank}\0WORLD_SIZE=2\0PAIRBENCH_LAUNCH=x{rank}\0".encode())
    assert launch_root(tmp_path, 50) == launch_root(tmp_path, 51) == 30
