"""The process in which a technique is measured: ``python -m harness.worker JOB.json``, alone or one of many ranks."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from harness.job import Events, MeasureJob


def main(path: str) -> None:
    """Measures every workload of the job and says so; a death in between is the runner's to report."""
    job = MeasureJob.read(Path(path))
    if job.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported, so before the pair's
    import torch

    from harness.discover import find, load_pair
    from harness.measure import Measurement
    from harness.memory import keep_imports
    from harness.ranked import Agreement
    from harness.world import close_world, init_world

    if job.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU is visible to torch here; use --device cpu")
    torch.manual_seed(job.seed)
    rank, world, mesh = init_world(job.device, job.share_gpus)
    events = Events(Path(job.out), rank)
    agreement = Agreement(rank, world)
    pair = load_pair(find(job.technique))
    chosen = [pair.variant(name) for name in pair.variants if name in job.variants]
    keep_imports(any(v.compiled for v in chosen) and any(w.tier != "smoke" for w in job.workloads))
    for workload in job.workloads:
        if agreement.decide(job.until is not None and time.time() >= job.until):
            break  # what was not begun is the runner's to tell
        Measurement(pair, workload, job, agreement, events).run(mesh)
    events.done()
    events.close()
    close_world()


if __name__ == "__main__":
    main(sys.argv[1])
