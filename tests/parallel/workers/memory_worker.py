"""Builds context-parallel steps on real ranks and tells their counters; for the tests.

``python -m memory_worker CASES.json OUT.json``: a list of {key, variant, dtype, dims}. OUT holds the counters by key,
and ``communicated``: bytes that the communication of a step, sent by itself, put on the link.
"""

import json
import sys
from pathlib import Path

import torch

from harness.pair import Context, Inputs
from harness.workload import parse_workload
from harness.world import close_world, init_world
from impls.parallel.context_parallel import PAIR


def measure(case, rank, world, mesh):
    raw = {"name": "test", "tier": "smoke", "dtype": case["dtype"], **case["dims"], "ranks": world}
    workload = parse_workload("context_parallel", raw, "test")
    context = Context(torch.device("cpu"), getattr(torch, workload.dtype), 7, rank, world, mesh)
    built = PAIR.variant(case["variant"]).fn(workload, context)
    built.load(Inputs(PAIR.inputs(workload, context), 7))
    built.run()
    told = dict(built.counters())
    if hasattr(built, "communicate"):
        built.link.reset()
        built.communicate()
        told["communicated"] = built.link.most(built.link.sent, context.device)
    return told


def main(cases, out):
    rank, world, mesh = init_world("cpu")
    told = {case["key"]: measure(case, rank, world, mesh) for case in json.loads(Path(cases).read_text())}
    if rank == 0:
        Path(out).write_text(json.dumps(told))
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
