"""Worlds of ranks: the one that a worker makes from its environment, and the one that a supervisor joins.

Inside a worker, :func:`init_world` makes the process group and :func:`close_world` ends it.

When ``pairbench`` itself was started by ``torchrun`` or ``srun``, every process of it is a supervisor: it joins the
others over a store of keys (:func:`join`), starts one worker per technique, and all the workers of one launch meet
under a prefix of that store which no other launch uses. A rank that dies takes its launch along, not the world.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from harness.errors import UsageError
from harness.evidence import Failure
from harness.launch import LIMIT

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import PrefixStore, TCPStore
    from torch.distributed.device_mesh import DeviceMesh

PREFIX = "PAIRBENCH_STORE_PREFIX"
_DEFAULT_LIMIT_S = 300.0
#: How long supervisors wait for each other at the start and the end of a launch (s).
_JOIN_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where this process stands in a world that somebody else has made."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    addr: str
    port: int
    source: str
    agent_store: bool = False


def detect_world(environment: Mapping[str, str]) -> Place | None:
    """The world that ``torchrun`` or ``srun`` has put this process into, or None when it is alone.

    An ``sbatch`` script itself is no task of a world (it has no SLURM_STEP_ID): there ranks are started on this host.

    Raises:
        UsageError: a variable of the world is missing or no number; names it.
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        world = _number(environment, "WORLD_SIZE", "torchrun")
        if world == 1:
            return None
        return Place(
            rank=_number(environment, "RANK", "torchrun"),
            world=world,
            local_rank=_number(environment, "LOCAL_RANK", "torchrun"),
            local_world=_number(environment, "LOCAL_WORLD_SIZE", "torchrun"),
            addr=_text(environment, "MASTER_ADDR", "torchrun"),
            port=_number(environment, "MASTER_PORT", "torchrun"),
            source="torchrun",
            agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
    if "SLURM_PROCID" in environment and environment.get("SLURM_STEP_ID", "").isdigit():
        ranks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
        world = _number(environment, ranks, "srun")
        if world == 1:
            return None
        nodes = environment.get("SLURM_STEP_NODELIST") or _text(environment, "SLURM_JOB_NODELIST", "srun")
        job = _number(environment, "SLURM_JOB_ID", "srun")
        port = environment.get("MASTER_PORT")
        return Place(
            rank=_number(environment, "SLURM_PROCID", "srun"),
            world=world,
            local_rank=_number(environment, "SLURM_LOCALID", "srun"),
            local_world=_tasks_here(environment, world),
            addr=environment.get("MASTER_ADDR") or first_host(nodes),
            port=_number(environment, "MASTER_PORT", "srun") if port else 20000 + job % 20000,
            source="srun",
        )
    return None


def first_host(nodes: str) -> str:
    """The first host of Slurm's list: ``gpu[03-05,9],cpu1`` → ``gpu03``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    if match is None:
        raise UsageError(f"cannot read a host from Slurm's list {nodes!r}; set MASTER_ADDR to the host of rank 0")
    stem, number, rest = match.groups()
    return f"{stem}{number or ''}{rest or ''}"


def _tasks_here(environment: Mapping[str, str], world: int) -> int:
    """This node's entry of SLURM_STEP_TASKS_PER_NODE, like ``8(x2),4``."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(world))
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise UsageError(f"SLURM_TASKS_PER_NODE is {text!r}, which is no list of counts")
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(environment.get("SLURM_NODEID", "0"))
    return counts[node] if node < len(counts) else counts[-1]


def _text(environment: Mapping[str, str], key: str, source: str) -> str:
    value = environment.get(key, "")
    if not value:
        raise UsageError(f"this looks like a world of {source}, but {key} is not set")
    return value


def _number(environment: Mapping[str, str], key: str, source: str) -> int:
    value = _text(environment, key, source)
    if not value.isdigit():
        raise UsageError(f"this looks like a world of {source}, but {key} is {value!r} and not a whole number")
    return int(value)


class Joined:
    """A supervisor's seat in a joined world: it counts the launches and passes failures on between supervisors."""

    def __init__(self, place: Place, store: TCPStore) -> None:
        self.place = place
        self._root = store
        self._launches = 0
        self._shares = 0

    @property
    def prefix(self) -> str:
        """Under which the workers of the launch in hand meet; another one for every launch."""
        return f"pairbench/{self._launches}"

    def child_environment(self) -> dict[str, str]:
        """What the worker of this launch needs in order to meet the others."""
        place = self.place
        return {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world),
            "LOCAL_RANK": str(place.local_rank),
            "LOCAL_WORLD_SIZE": str(place.local_world),
            "MASTER_ADDR": place.addr,
            "MASTER_PORT": str(place.port),
            PREFIX: self.prefix,
        }

    def _store(self) -> PrefixStore:
        from torch._C._distributed_c10d import PrefixStore

        return PrefixStore(f"{self.prefix}/supervisors", self._root)

    def share(self, mine: str, limit_s: float = _JOIN_S) -> str:
        """Rank 0's text, on every supervisor; the others' own is let go.

        Raises:
            UsageError: rank 0 did not answer in time.
        """
        self._shares += 1
        key = f"pairbench/shared/{self._shares}"
        if self.place.rank == 0:
            self._root.set(key, mine)
            self._see_off(f"{key}/read")
            return mine
        if not _wait_for(lambda: self._root.check([key]), limit_s):
            raise UsageError(f"rank 0 of the world made by {self.place.source} did not answer within {limit_s:g} s")
        said = str(self._root.get(key).decode())
        self._root.add(f"{key}/read", 1)
        return said

    def _see_off(self, key: str) -> None:
        """Rank 0 may hold the store: it waits until the others have read what they came for, before it leaves."""
        _wait_for(lambda: self._root.add(key, 0) >= self.place.world - 1, _JOIN_S)

    def told(self) -> Failure | None:
        """The failure that another supervisor has reported for the launch in hand, if any."""
        store = self._store()
        return Failure(**json.loads(store.get("failed"))) if store.check(["failed"]) else None

    def agree(self, mine: Failure | None, limit_s: float) -> Failure | None:
        """What all supervisors report for this launch: the first failure, or None when every rank passed.

        Ends the launch: the next one has a prefix of its own.
        """
        store = self._store()
        if mine is not None:
            if mine.about_peer:
                _wait_for(lambda: store.check(["failed"]), 1.0)  # the peer's own supervisor knows better
            store.compare_set("failed", "", json.dumps(asdict(mine)))
        store.add("ended", 1)
        ended = _wait_for(lambda: store.add("ended", 0) >= self.place.world, limit_s + _JOIN_S)
        verdict = self.told()
        if verdict is None and not ended:
            missing = self.place.world - int(store.add("ended", 0))
            verdict = Failure("error", f"{missing} supervisors of the world did not answer", "")
        left = f"{self.prefix}/left"
        if self.place.rank == 0 and ended:
            self._see_off(left)
        else:
            self._root.add(left, 1)
        self._launches += 1
        return verdict


def _wait_for(condition: object, seconds: float) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def join(place: Place, timeout_s: float = _JOIN_S) -> Joined:
    """Join the other supervisors of the world; returns once all are there.

    Raises:
        UsageError: the port is in use, the store cannot be reached, or not all ranks came in time; names address, port
            and the way out.
    """
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    where = f"{place.addr}:{place.port}"
    hosts = place.rank == 0 and not place.agent_store
    try:
        store = TCPStore(
            place.addr,
            place.port,
            world_size=place.world,
            is_master=hosts,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (DistError, RuntimeError) as err:
        if hosts and re.search("in use|EADDRINUSE", str(err)):
            raise UsageError(f"port {place.port} is in use on {place.addr}; set MASTER_PORT to a free one") from err
        raise UsageError(
            f"rank {place.rank} of {place.world} cannot reach {where} within {timeout_s:g} s: {err}"
        ) from err
    store.add("pairbench/joined", 1)
    if not _wait_for(lambda: store.add("pairbench/joined", 0) >= place.world, timeout_s):
        here = store.add("pairbench/joined", 0)
        raise UsageError(
            f"{here} of {place.world} ranks came to {where} within {timeout_s:g} s; start all with {place.source}"
        )
    return Joined(place, store)


def init_world(device: torch.device | str, share_gpus: bool = False) -> tuple[int, int, DeviceMesh | None]:
    """Make the process group of this worker's launch: NCCL on CUDA, gloo on the CPU.

    Returns rank, world size and a mesh of one dimension, ``ranks``; ``(0, 1, None)`` when the worker is alone, and then
    makes no process group. On CUDA it makes this rank's GPU the current one, and CPU tensors go over gloo beside NCCL.

    share_gpus: with more ranks than GPUs use gloo on CUDA tensors (correctness only, and no send or recv).

    Raises:
        UsageError: more ranks than GPUs under NCCL, a backend that this torch lacks, or peers that cannot be reached.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1, None
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    kind = torch.device(device).type
    rank = int(os.environ["RANK"])
    backend = _backend(kind, share_gpus)
    # Past the launch's own limit: the launcher ends a hang first, and its report has every rank's stack.
    timeout = timedelta(seconds=float(os.environ.get(LIMIT, _DEFAULT_LIMIT_S)) + 10.0)
    try:
        if prefix := os.environ.get(PREFIX):
            from torch._C._distributed_c10d import PrefixStore, TCPStore

            root = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)
            store = PrefixStore(f"{prefix}/workers", root)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        else:
            dist.init_process_group(backend, timeout=timeout)
    except dist.DistNetworkError as err:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise UsageError(f"rank {rank} of {world} cannot meet the others at {where}: {err}") from err
    return rank, world, init_device_mesh(kind, (world,), mesh_dim_names=("ranks",))


def _backend(kind: str, share_gpus: bool) -> str:
    """The backend for that kind of device; on CUDA also makes this rank's GPU the current one."""
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        raise UsageError("this torch was built without torch.distributed: several ranks need a build that has it")
    if kind == "cpu":
        if not dist.is_gloo_available():
            raise UsageError("this torch was built without gloo, which ranks on the CPU need")
        return "gloo"
    if kind != "cuda":
        raise UsageError(f"no collective backend is known for device {kind!r}; use cuda or cpu")
    here, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if here > gpus and not (share_gpus and gpus):
        raise UsageError(
            f"{here} ranks on this host, but {gpus} GPU{'s' if gpus != 1 else ''}: NCCL needs one for each rank; "
            f"use --ranks {max(gpus, 1)} or --device cpu"
        )
    torch.cuda.set_device(local % gpus)
    if here > gpus:
        return "gloo"
    if not dist.is_nccl_available():
        raise UsageError("this torch was built without NCCL, which ranks on GPUs need; use --device cpu")
    return "cuda:nccl,cpu:gloo"


def close_world() -> None:
    """End the process group, if there is one."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
