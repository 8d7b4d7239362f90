"""Runs variants of the parallel pairs on real ranks and says how far they are from one process; for the tests.

``python -m equal_worker CASES.json OUT.json [DEVICE]``: a list of {key, technique, variant, dtype, dims}. For each,
OUT holds the relative error of every tensor, the bytes that crossed the link and the pair's work, or the error.
"""

import importlib
import json
import sys
from pathlib import Path

import torch

from harness.pair import Context, Inputs
from harness.workload import parse_workload
from harness.world import close_world, init_world

CPU = torch.device("cpu")


def workload_of(case, ranks):
    raw = {"name": "test", "tier": "smoke", "dtype": case["dtype"], **case["dims"], "ranks": ranks}
    return parse_workload(case["technique"], raw, "test")


def run(pair, case, inputs):
    case.load(inputs)
    for _ in range(pair.check_runs):
        case.run()
    return {name: x.clone() for name, x in case.result().items()}


def measure(case, rank, world, mesh, device=CPU):
    pair = importlib.import_module(f"impls.parallel.{case['technique']}").PAIR
    workload = workload_of(case, world)
    dtype = getattr(torch, workload.dtype)
    context = Context(device, dtype, 7, rank, world, mesh)
    variant = pair.variant(case["variant"])
    if variant.supports is not None and (reason := variant.supports(workload)):
        return {"skipped": reason}
    inputs = Inputs(pair.inputs(workload, context), 7)
    built = variant.fn(workload, context)
    built.link.muted = case.get("muted", False)
    first = run(pair, built, inputs)
    found = run(pair, built, inputs)
    same = all(torch.equal(first[name], found[name]) for name in found)
    built.run()
    counters = {"link_bytes": built.link.most(built.link.sent, device)}
    if case.get("counters"):  # these take time of their own
        told = dict(built.counters())
        assert told["link_bytes"] == counters["link_bytes"]
        counters = told
    if hasattr(built, "close"):
        built.close()
    out = {"counters": counters, "work": pair.work(workload).link_bytes, "repeats": same}
    if rank == 0:
        truth = run(pair, pair.oracle(workload, Context(device, dtype, 7)), inputs)
        out["names"] = [sorted(truth), sorted(found)]
        out["errors"] = {name: error(truth[name], found[name]) for name in truth if name in found}
    return out


def error(truth, found):
    same_dtype = truth.dtype == found.dtype or found.dtype in (torch.bfloat16, torch.float16)
    if truth.shape != found.shape or not same_dtype:
        return f"{tuple(truth.shape)} {truth.dtype} against {tuple(found.shape)} {found.dtype}"
    if truth.stride() != found.stride():
        return f"strides {truth.stride()} against {found.stride()}"
    truth, found = truth.double(), found.double()
    return float((truth - found).norm() / truth.norm().clamp_min(1e-300))


def main(cases, out, device="cpu"):
    rank, world, mesh = init_world(device)
    answers = {}
    for case in json.loads(Path(cases).read_text()):
        try:
            answers[case["key"]] = measure(case, rank, world, mesh, torch.device(device))
        except ValueError as err:  # bad input: every rank must refuse it by itself, or this worker hangs
            answers[case["key"]] = {"refused": str(err)}
    if rank == 0:
        Path(out).write_text(json.dumps(answers))
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
