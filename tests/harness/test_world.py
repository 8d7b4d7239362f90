"""Worlds are read from the environment, joined by supervisors and made by workers; every error names its cause."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import UsageError
from harness.world import Place, detect_world, first_host, init_world, join

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).parent.parent.parent
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.7",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "20",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "12345",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "8(x2),4",
    "SLURM_JOB_NODELIST": "gpu[03-05]",
}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_alone_is_no_world():
    assert detect_world({}) is None
    assert detect_world({**TORCHRUN, "WORLD_SIZE": "1"}) is None


def test_torchrun():
    assert detect_world(TORCHRUN) == Place(3, 4, 1, 2, "10.0.0.7", 29500, "torchrun")
    found = detect_world({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found is not None
    assert found.agent_store


def test_srun():
    assert detect_world(SRUN) == Place(9, 20, 1, 8, "gpu03", 32345, "srun")
    chosen = detect_world({**SRUN, "MASTER_ADDR": "head", "MASTER_PORT": "4000", "SLURM_NODEID": "2"})
    assert chosen == Place(9, 20, 1, 4, "head", 4000, "srun")


def test_a_batch_script_outside_srun_is_alone():
    assert detect_world({k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"}) is None


@pytest.mark.parametrize("key", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(key):
    with pytest.raises(UsageError, match=f"torchrun, but {key} is not set"):
        detect_world({k: v for k, v in TORCHRUN.items() if k != key})


def test_a_variable_that_is_no_number_is_named():
    with pytest.raises(UsageError, match="MASTER_PORT is 'x'"):
        detect_world({**TORCHRUN, "MASTER_PORT": "x"})
    with pytest.raises(UsageError, match="SLURM_TASKS_PER_NODE"):
        detect_world({**SRUN, "SLURM_TASKS_PER_NODE": "many"})


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("gpu03", "gpu03"), ("gpu[03-05,9],cpu1", "gpu03"), ("a1,a2", "a1"), ("n[7,9]-ib", "n7-ib")],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} is in use on 127.0.0.1; set MASTER_PORT"):
            join(Place(0, 2, 0, 2, "127.0.0.1", port, "srun"), timeout_s=3)


def test_ranks_that_do_not_come_are_counted():
    port = free_port()
    with pytest.raises(UsageError, match="1 of 2 ranks came to"):
        join(Place(0, 2, 0, 2, "127.0.0.1", port, "srun"), timeout_s=0.5)


def test_a_store_that_nobody_hosts_is_named():
    port = free_port()
    with pytest.raises(UsageError, match=f"rank 1 of 2 cannot reach 127.0.0.1:{port}"):
        join(Place(1, 2, 1, 2, "127.0.0.1", port, "srun"), timeout_s=1)


def test_a_worker_alone_makes_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert init_world("cpu") == (0, 1, None)


def test_more_ranks_than_gpus_under_nccl_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="2 ranks on this host, but 1 GPU: NCCL needs one for each rank"):
        init_world("cuda")


@pytest.mark.parametrize(
    ("check", "device", "words"),
    [("is_gloo_available", "cpu", "without gloo"), ("is_available", "cpu", "without torch.distributed")],
)
def test_a_missing_backend_is_named(monkeypatch, check, device, words):
    import torch.distributed as dist

    monkeypatch.setattr(dist, check, lambda: False)
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match=words):
        init_world(device)


def test_a_missing_nccl_is_named(monkeypatch):
    import torch
    import torch.distributed as dist

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="without NCCL"):
        init_world("cuda")


def test_an_unknown_device_is_named(monkeypatch):
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UsageError, match="no collective backend is known for device 'meta'"):
        init_world("meta")


JOBS = ["pass", "collective die 1", "raise 0", "collective pass 0"]
EXPECTED = [
    ["passed", "", None],
    ["error", "rank 1 died: exit code -9 (SIGKILL)", 1],
    ["error", "rank 0: RuntimeError: planted on rank 0", 0],
    ["passed", "", None],
]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(WORKERS)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def outcomes(folder: Path) -> list[object]:
    return [json.loads((folder / f"outcomes{rank}.json").read_text()) for rank in (0, 1)]


def test_in_a_world_of_srun_a_dead_rank_costs_one_launch(tmp_path):
    port = str(free_port())
    processes = []
    for rank in ("0", "1"):
        slurm = {**SRUN, "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
        slurm |= {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-m", "fake_supervisor", str(tmp_path), *JOBS]
        processes.append(subprocess.Popen(command, env=environment() | slurm))
    assert [process.wait() for process in processes] == [0, 0]
    assert outcomes(tmp_path) == [EXPECTED, EXPECTED]


@pytest.mark.slow
def test_in_a_world_of_torchrun_a_dead_rank_costs_one_launch(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "fake_supervisor", str(tmp_path), *JOBS]
    assert subprocess.run(command, env=environment()).returncode == 0
    assert outcomes(tmp_path) == [EXPECTED, EXPECTED]
