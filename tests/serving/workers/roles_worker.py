"""Serves a trace on real ranks, side by side and in roles, and tells what came of it; for the tests.

``python -m roles_worker CASES.json OUT.json DEVICE``: a list of {key, variant, dims} and optionally ``buffer`` (bytes
of a link's buffer), ``ahead`` (the engines launch a step before they have the last one's tokens, as on a GPU they do
anyway), ``decode_blocks`` (size of the decode side's cache), ``slow`` (seconds that each turn of a role
takes longer), ``runs`` (how often it is served; once by default) and ``cancel`` (numbers of requests that are cancelled
once they were handed over). OUT holds for each run of each the tokens, the timeline and the counters, and with the last
one the oracle's tokens and the lengths of the prompts.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from harness.discover import find, load_pair, workloads_of
from harness.pair import Context, Inputs
from harness.world import close_world, init_world
from impls.serving import disaggregated_serving, kv_wire
from impls.serving.role_workers import PrefillWorker


def built(pair, case, workload, ctx):
    """The variant, with what the case changes."""
    kv_wire.BUFFER = case.get("buffer", 32 << 20)
    decode_config = disaggregated_serving.decode_config
    if "decode_blocks" in case:
        disaggregated_serving.decode_config = lambda w: replace(decode_config(w), num_blocks=case["decode_blocks"])
    try:
        return pair.variant(case["variant"]).fn(workload, ctx)
    finally:
        disaggregated_serving.decode_config = decode_config


def disturb(serve, case):
    """Slows roles down, and cancels."""
    worker, turn = serve.worker, serve.worker.turn
    role = "prefill" if isinstance(worker, PrefillWorker) else "decode"
    left = set(case.get("cancel", ()))

    def disturbed():
        time.sleep(case.get("slow", {}).get(role, 0.0))
        if role == "prefill":
            for number in [n for n in left if n in worker.handed_over]:
                left.remove(number)
                worker.cancel(serve.requests[number].id)
        return turn()

    worker.turn = disturbed


def truth(pair, workload, ctx, inputs):
    """The oracle's tokens; cases of the same requests share them."""
    asked = str(inputs["requests"])
    if asked not in _TRUTHS:
        oracle = pair.oracle(workload, ctx)
        oracle.load(inputs)
        oracle.run()
        _TRUTHS[asked] = oracle.result()
    return _TRUTHS[asked]


_TRUTHS: dict[str, dict[str, list[int]]] = {}


def measure(case, rank, world, device):
    pair, technique = load_pair(find("disaggregated_serving")), find("disaggregated_serving")
    workload = next(w for w in workloads_of(technique) if w.name == "tiny").replace(**case["dims"], ranks=world)
    ctx = Context(torch.device(device), torch.float32, 3, rank, world)
    inputs = Inputs(pair.inputs(workload, ctx), 3)
    serve = built(pair, case, workload, ctx)
    if case.get("ahead"):
        serve.engine.config = replace(serve.engine.config, lookahead=True)
    serve.load(inputs)
    if case["variant"] == "optimized":
        disturb(serve, case)
    told = []
    for _ in range(case.get("runs", 1)):
        serve.run()
        told.append({"tokens": serve.result(), "timeline": serve.timeline(), "counters": serve.counters()})
    serve.close()
    if rank == 0:
        told[-1]["oracle"] = truth(pair, workload, replace(ctx, rank=0, world=1), inputs)
        told[-1]["prompts"] = {request.id: len(request.prompt) for request in inputs["requests"]}
    return told


def main(cases, out, device):
    rank, world, _ = init_world(device)
    told = {}
    for case in json.loads(Path(cases).read_text()):
        told[case["key"]] = measure(case, rank, world, device)
    if rank == 0:
        Path(out).write_text(json.dumps(told))
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
