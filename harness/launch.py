"""Run one worker program on one or many ranks, with a time limit, and say what became of it.

One rank is a plain subprocess. N ranks on this host run under torch's own elastic agent (:mod:`harness.elastic`). In a
world that ``torchrun`` or ``srun`` has made, each process supervises one child of its own (:mod:`harness.world`).

Whatever happens (an error, a dead or hung rank, Ctrl-C, kill -9 of this process), no process stays behind.

A launch's folder holds, for every rank N: ``rankN.log`` (stdout and stderr), ``rankN.error.json`` (an uncaught
exception), ``rankN.stack`` (stacks of a hung or crashed rank), ``rankN.pid``; and ``supervisor.log``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness import evidence
from harness.errors import UsageError
from harness.guard import LOGS
from harness.processes import MARK, Sentry, end_all, marked, nested_mark, oom_kills, send

if TYPE_CHECKING:
    from harness.world import Joined

#: Seconds that the launch may take; workers size the timeout of their process group by it.
LIMIT = "PAIRBENCH_TIME_LIMIT"
_ROOT = Path(__file__).resolve().parent.parent
_STACK_PATIENCE_S = 1.0
#: What a world leaves in the environment; a launch of its own starts without it.
_WORLD_KEYS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "PAIRBENCH_STORE_PREFIX"),
)


@dataclass(frozen=True)
class Job:
    """One program to run: ``python -m module args…`` on ``ranks`` processes, ended after ``timeout_s`` seconds.

    logs: the folder for the ranks' logs (made if it is missing; must hold no earlier launch); a new temporary folder
        when None. env: variables set on top of this process's own.
    """

    module: str
    args: tuple[str, ...] = ()
    ranks: int = 1
    timeout_s: float = 300.0
    logs: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise UsageError(f"a launch needs at least 1 rank, got {self.ranks}")
        if not self.timeout_s > 0:
            raise UsageError(f"a launch needs a time limit above 0 s, got {self.timeout_s}")


@dataclass(frozen=True)
class Outcome:
    """What became of a launch. ``reason`` and ``traceback`` are empty when it passed; ``rank`` failed first."""

    status: evidence.Status
    reason: str
    traceback: str
    logs: Path
    rank: int | None = None
    seconds: float = 0.0


def launch(job: Job, world: Joined | None = None, poll: Callable[[], str | None] | None = None) -> Outcome:
    """Run the job to its end and clean up after it.

    poll: called several times a second while the job runs; a text that it returns ends the job as hung, saying so.

    world: the world that this process has joined (:func:`harness.world.join`); every process of the world must then
    launch the same jobs in the same order, and all get the same outcome. None: this host, ranks of our own.

    Raises:
        UsageError: the folder of the logs cannot be used, or ``job.ranks`` is not the joined world's size.
        RuntimeError: a process could not be ended (it hangs in the kernel); names the pids.
    """
    if world is not None and job.ranks != world.place.world:
        raise UsageError(
            f"this job needs {job.ranks} ranks and the world made by {world.place.source} has {world.place.world}"
        )
    folder = _folder(job, world)
    mark = uuid.uuid4().hex
    environment = _environment(job, folder, mark, world)
    # -P: a folder called harness where the user happens to stand is not ours.
    command = [sys.executable, "-P", "-m"]
    if job.ranks == 1 or world is not None:
        command += ["harness.guard", job.module, *job.args]
    else:
        command += ["harness.elastic", str(job.ranks), job.module, *job.args]
    kills_before = oom_kills()
    started = time.monotonic()
    sentry = Sentry(mark)
    process = None
    try:
        with open(folder / "supervisor.log", "ab") as log:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        found = _watch(job, folder, mark, process, started, kills_before, world, poll)
    finally:
        left = end_all(mark)
        sentry.dismiss()
        if process is not None and process.pid not in left:
            process.wait()
    if left:
        raise RuntimeError(f"processes {left} of {job.module} cannot be ended")
    if world is not None:
        found = world.agree(found, job.timeout_s)
    seconds = time.monotonic() - started
    if found is None:
        return Outcome("passed", "", "", folder, None, seconds)
    return Outcome(found.status, found.reason, found.traceback, folder, found.rank, seconds)


def _watch(
    job: Job,
    folder: Path,
    mark: str,
    process: subprocess.Popen[bytes],
    started: float,
    kills_before: int | None,
    world: Joined | None,
    poll: Callable[[], str | None] | None,
) -> evidence.Failure | None:
    """Wait for the end, the time limit, or the word of another supervisor; None when the job passed."""
    while True:
        code = process.poll()
        if code is not None:
            break
        if time.monotonic() - started >= job.timeout_s:
            _ask_for_stacks(folder, mark)
            return evidence.hang(folder, f"no end within {job.timeout_s:g} s")
        stuck = poll() if poll is not None else None
        if stuck is not None:
            _ask_for_stacks(folder, mark)
            return evidence.hang(folder, stuck)
        told = world.told() if world is not None else None
        if told is not None:
            return told
        left = job.timeout_s - (time.monotonic() - started)
        _wait(process, 0.2 if world is not None or poll is not None else min(1.0, left))
    if code == 0:
        return None
    kills_after = oom_kills()
    oom_killed = kills_before is not None and kills_after is not None and kills_after > kills_before
    return evidence.failure(folder, _exit_codes(job, folder, code, world), oom_killed)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return


def _exit_codes(job: Job, folder: Path, code: int, world: Joined | None) -> dict[int, int]:
    """Exit codes of the failed ranks; of the supervisor's own failure nothing."""
    if world is not None:
        return {world.place.rank: code}
    if job.ranks == 1:
        # Without a pid file the guard never began; what Python said is in the supervisor's log.
        return {0: code} if (folder / "rank0.pid").exists() else {}
    failures = folder / "failures.json"
    if not failures.exists():
        return {}
    return {int(rank): int(c) for rank, c in json.loads(failures.read_text())["exit_codes"].items()}


def _ask_for_stacks(folder: Path, mark: str) -> None:
    alive = set(marked(mark))
    pids = [pid for pid in (int(path.read_text() or 0) for path in folder.glob("rank*.pid")) if pid in alive]
    send(pids, signal.SIGUSR1)
    deadline = time.monotonic() + _STACK_PATIENCE_S
    while time.monotonic() < deadline:
        if sum(path.stat().st_size > 0 for path in folder.glob("rank*.stack")) >= len(pids):
            break
        time.sleep(0.02)
    time.sleep(0.05)  # the dump is many small writes


def _folder(job: Job, world: Joined | None) -> Path:
    if job.logs is None:
        return Path(tempfile.mkdtemp(prefix="pairbench-launch-"))
    # The supervisors of a world may share a file system.
    folder = job.logs if world is None else job.logs / f"supervisor{world.place.rank}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise UsageError(f"cannot make the folder of the logs {folder}: {err.strerror}") from err
    if any(folder.glob("rank*")):
        raise UsageError(f"the folder of the logs {folder} already holds a launch; give each its own")
    return folder


def threads_per_rank(ranks: int, environment: Mapping[str, str]) -> int:
    """Cores over ranks, at least 1; fewer when the user's own OMP_NUM_THREADS says so."""
    share = max(1, len(os.sched_getaffinity(0)) // ranks)
    asked = environment.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdigit() and int(asked) > 0 else share


def _environment(job: Job, folder: Path, mark: str, world: Joined | None) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _WORLD_KEYS and not k.startswith("TORCHELASTIC_")}
    environment.update(job.env)
    paths = [str(_ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment["PYTHONUNBUFFERED"] = "1"
    environment[MARK] = nested_mark(mark)
    environment[LOGS] = str(folder)
    environment[LIMIT] = str(job.timeout_s)
    here = job.ranks if world is None else world.place.local_world
    environment["OMP_NUM_THREADS"] = str(threads_per_rank(here, environment))
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    if world is not None:
        environment |= world.child_environment()
    elif job.ranks > 1 and Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: no name to resolve, no network to show up on
    return environment
