"""Who used the CPU, from a faked /proc whose counters the test moves."""

import os

import pytest

from harness.cpu_watch import CpuWatch, cpu_ticks, own_tree

HZ = os.sysconf("SC_CLK_TCK")


class FakeHost:
    """A /proc with two cores, this tree (10 → 11, 12) and a stranger (20), and a /sys with CPU counters."""

    def __init__(self, root):
        self.proc, self.sys = root / "proc", root / "sys"
        self.now = 100.0
        self.busy = self.stolen = 0.0
        self.cpu_s = {10: 0.0, 11: 0.0, 12: 0.0, 20: 0.0}
        self.parent = {10: 1, 11: 10, 12: 11, 20: 1}
        (self.sys / "fs/cgroup").mkdir(parents=True)
        (self.sys / "devices/system/cpu/cpu0/thermal_throttle").mkdir(parents=True)
        self.write()

    def write(self, thermal=0, quota=0):
        self.proc.mkdir(exist_ok=True)
        half, stolen = self.busy * HZ / 2, self.stolen * HZ / 2
        line = f"{half:.0f} 0 0 5000 7 0 0 {stolen:.0f} 0 0"
        self.proc.joinpath("stat").write_text(f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 {line}\ncpu1 {line}\nctxt 5\n")
        for pid, seconds in self.cpu_s.items():
            folder = self.proc / str(pid)
            folder.mkdir(exist_ok=True)
            ticks = int(seconds * HZ)
            (folder / "stat").write_text(
                f"{pid} (a) name ({pid}) S {self.parent[pid]} " + "0 " * 9 + f"{ticks} 0 0 0 20 0\n"
            )
        (self.sys / "fs/cgroup/cpu.stat").write_text(f"usage_usec 5\nnr_throttled {quota}\n")
        (self.sys / "devices/system/cpu/cpu0/thermal_throttle/core_throttle_count").write_text(f"{thermal}\n")

    def watch(self):
        return CpuWatch(10, self.proc, self.sys, now=lambda: self.now)

    def spend(self, wall, ours=0.0, others=0.0, stolen=0.0, **counters):
        self.now += wall
        self.busy += ours + others
        self.stolen += stolen
        self.cpu_s[12] += ours
        self.cpu_s[20] += others
        self.write(**counters)


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    return FakeHost(tmp_path)


def seen(host, **spent):
    watch = host.watch()
    watch.start()
    host.spend(**spent)
    return watch.stop()


def test_our_own_load_is_no_contention(host):
    found = seen(host, wall=2.0, ours=3.9, others=0.1)
    assert (found.available, found.contended, found.throttled) == (True, False, False)
    assert found.facts["own_cores"] == pytest.approx(1.95, abs=0.02)
    assert found.facts["other_cores"] == pytest.approx(0.05, abs=0.02)


def test_another_busy_process_is(host):
    found = seen(host, wall=2.0, ours=1.0, others=2.0)
    assert found.contended is True
    assert "1.00 of 2 cores" in found.why[0]


def test_stolen_time_is(host):
    found = seen(host, wall=2.0, stolen=0.4)
    assert found.contended is True
    assert "hypervisor" in found.why[0]


def test_too_short_a_span_blames_nobody(host):
    assert seen(host, wall=0.1, others=0.2).contended is False


def test_heat_and_a_used_up_quota_throttle(host):
    found = seen(host, wall=1.0, thermal=2, quota=3)
    assert found.throttled is True
    assert len(found.why) == 2
    assert (found.facts["thermal_events"], found.facts["quota_periods"]) == (2, 3)


def test_counters_of_a_child_that_ended_do_not_go_negative(host):
    watch = host.watch()
    watch.start()
    host.now += 1.0
    (host.proc / "12" / "stat").unlink()
    found = watch.stop()
    assert found.facts["own_cores"] == 0.0
    assert found.facts["other_cores"] == 0.0


def test_only_the_allowed_cores_count():
    stat = "cpu 9 9 9 9\ncpu0 10 1 2 99 9 3 4 5 0 0\ncpu1 100 0 0 0 0 0 0 50\ncpu10 7 0 0 0 0 0 0\nintr 5\n"
    assert cpu_ticks(stat, {0}) == (20.0, 5.0)
    assert cpu_ticks(stat, {0, 10}) == (27.0, 5.0)


def test_the_tree_is_found_whatever_the_names_of_its_processes(host):
    assert own_tree(10, host.proc) == {10, 11, 12}


def test_without_proc_it_says_so(tmp_path):
    watch = CpuWatch(10, tmp_path / "none", tmp_path)
    watch.start()
    found = watch.stop()
    assert found.available is False
    assert "cannot be read" in (found.reason or "")


def test_stopping_before_starting_is_a_mistake(host):
    with pytest.raises(RuntimeError, match="before it was started"):
        host.watch().stop()
