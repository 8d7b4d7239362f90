"""Builds ZeRO's steps on real ranks and tells what they hold; for the tests.

``python -m zero_worker CASES.json OUT.json``: a list of cases as ``equal_worker`` takes them, which answers those that
are not marked ``held``. Of one that is, OUT holds ``state``, the bytes that a rank keeps after a step, ``absolute`` and
``peak`` by the harness's own measurement, and for stage 3 ``whole``, the most bytes of gathered weights at any forward
or backward of a module, and ``left``, those after the step. Of the fullest rank each.
"""

import json
import sys
from itertools import accumulate
from pathlib import Path

import equal_worker
import torch

from harness import memory
from harness.pair import Context, Inputs
from harness.workload import parse_workload
from harness.world import close_world, init_world
from impls.parallel.zero import PAIR
from impls.parallel.zero_units import held_bytes


def gathered(case):
    """The most bytes of whole weights, looked at wherever weights are used or gradients are complete."""
    seen = []

    def look(*_):
        seen.append(sum(unit.flat.untyped_storage().nbytes() for unit in case.units))

    for module in case.model.modules():
        module.register_forward_hook(look, prepend=True)
        module.register_full_backward_hook(look)
    case.run()
    return max(seen), sum(unit.flat.untyped_storage().nbytes() for unit in case.units)


def allocated(call):
    """The most bytes that torch has allocated at once during the call, beyond those before it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def held(case, rank, world, mesh):
    raw = {"name": "test", "tier": "smoke", "dtype": case["dtype"], **case["dims"], "ranks": world}
    workload = parse_workload("zero", raw, "test")
    context = Context(torch.device("cpu"), getattr(torch, workload.dtype), 7, rank, world, mesh)
    inputs = Inputs(PAIR.inputs(workload, context), 7)
    before = memory.allocated(context.device)
    built = PAIR.variant(case["variant"]).fn(workload, context)
    built.load(inputs)
    resident = memory.measure(built.run, context.device, before).absolute
    told = {"resident": resident, "state": held_bytes(built, inputs.values())}
    built.release()  # the moments stay, as in every step but the first
    with built.quiet():  # gloo copies messages and frees the copies in threads of its own, unseen
        told["allocated"] = held_bytes(built, inputs.values()) + allocated(built.run)
    if case["variant"] == "stage3":
        told["whole"], told["left"] = gathered(built)
    told = {name: built.link.most(value or 0, context.device) for name, value in told.items()}
    if hasattr(built, "close"):
        built.close()
    return told


def main(cases, out):
    rank, world, mesh = init_world("cpu")
    told = {}
    for case in json.loads(Path(cases).read_text()):
        try:
            told[case["key"]] = (held if case.get("held") else equal_worker.measure)(case, rank, world, mesh)
        except ValueError as err:  # bad input, which every rank must refuse by itself
            told[case["key"]] = {"refused": str(err)}
    if rank == 0:
        Path(out).write_text(json.dumps(told))
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
