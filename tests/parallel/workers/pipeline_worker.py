"""Runs pipelines on real ranks; for the tests.

``python -m pipeline_worker CASES.json OUT.json``: a list of cases as ``equal_worker`` takes them, which answers those
that have no ``nap``. Of one that has, every forward of a rank's layers on a row sleeps so many seconds more, a backward
twice as long; OUT holds what ranks did in three steps, and for no seconds the counters. Sleeping takes no core: times
are those of a machine with cores to spare.
"""

import json
import sys
import time
from pathlib import Path

import equal_worker
import torch

from harness.pair import Context, Inputs
from harness.world import close_world, init_world
from impls.parallel.pipeline_parallel import PAIR


def counted(case, rank, world, mesh):
    workload = equal_worker.workload_of(case, world)
    context = Context(torch.device("cpu"), torch.float32, 7, rank, world, mesh)
    built = PAIR.variant(case["variant"]).fn(workload, context)
    built.load(Inputs(PAIR.inputs(workload, context), 7))
    built.run()
    if not case["nap"]:
        return {"counters": dict(built.counters())}
    nap = case["nap"] * workload.batch / built.schedule.micro_batches / (built.stages // world)
    compute = built.compute

    def slowly(one):
        compute(one)
        time.sleep(nap if one.kind == "forward" else 2 * nap)

    built.compute = slowly
    return {"steps": [built.watched() for _ in range(3)]}


def main(cases, out):
    rank, world, mesh = init_world("cpu")
    told = {}
    for case in json.loads(Path(cases).read_text()):
        try:
            told[case["key"]] = (counted if "nap" in case else equal_worker.measure)(case, rank, world, mesh)
        except ValueError as err:  # bad input, which every rank must refuse by itself
            told[case["key"]] = {"refused": str(err)}
    if rank == 0:
        Path(out).write_text(json.dumps(told))
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
