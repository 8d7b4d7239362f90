"""Supervise N ranks of one program on this host with torch's own elastic agent (the machinery behind ``torchrun``).

Run by :mod:`harness.launch` as ``python -m harness.elastic RANKS MODULE ARGS…`` in a process of its own. The rendezvous
is new each time and takes a port that the system gives (port 0), so two launches never meet. A rank that fails ends
all; the exit codes go to ``failures.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from harness.guard import LOGS
from harness.processes import die_with_parent

#: How long a rank may take to end by itself once another has failed (s).
SHUTDOWN_S = 2


def supervise(ranks: int, command: list[str], folder: Path) -> int:
    """Run ``python command…`` on every rank; 0 when all passed, 1 with ``failures.json`` written when one failed."""
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_S)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 60},
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.05,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    try:
        launch_agent(config, sys.executable, command)
    except ChildFailedError as failed:
        rows = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        (folder / "failures.json").write_text(json.dumps({"time": time.time(), "exit_codes": rows}))
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """``RANKS MODULE ARGS…``."""
    die_with_parent()
    ranks, command = int(arguments[0]), arguments[1:]
    return supervise(ranks, ["-P", "-m", "harness.guard", *command], Path(os.environ[LOGS]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
