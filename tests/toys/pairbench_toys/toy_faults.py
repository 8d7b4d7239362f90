"""An op whose variants fail in every way that a variant can."""

import os
import signal
import time

import torch

from harness.pair import Claim, Pair, Variant, Work


def inputs(workload, ctx):
    return {"x": ctx.randn(workload.rows, 8)}


def right(x):
    return x * 2


def oracle(x):
    return x + x


def wrong(x):
    return x * 2.01


def not_a_number(x):
    out = x * 2
    out[0, 0] = float("nan")
    return out


def raises(x):
    raise RuntimeError("this variant is broken")


def out_of_memory(x):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 PiB")


def overwrites(x):
    return x.mul_(2)


def hangs(x):
    if os.environ.get("PAIRBENCH_TOY_FAULT") == "hang":
        time.sleep(600)
    return x * 2


def dies(x):
    if os.environ.get("PAIRBENCH_TOY_FAULT") == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return x * 2


def work(workload):
    return Work(flops=8 * workload.rows, bytes=64 * workload.rows, items=workload.rows, unit="rows")


PAIR = Pair(
    name="toy_faults",
    layer="kernel",
    relieves="memory",
    claim=Claim(latency="lower"),
    inputs=inputs,
    oracle=oracle,
    variants={
        "baseline": right,
        "optimized": right,
        "wrong": wrong,
        "nan": not_a_number,
        "raises": raises,
        "oom": out_of_memory,
        "overwrites": overwrites,
        "hangs": hangs,
        "dies": dies,
        "one_line": Variant(right, peer="torch"),
        "elsewhere": Variant(right, requires=("package:no_such_package",)),
    },
    work=work,
    predict=lambda workload: 1.0,
)

WORKLOADS = [
    {"name": "small", "tier": "smoke", "dtype": "float32", "rows": 16, "direction": "forward"},
    {"name": "large", "tier": "smoke", "dtype": "float32", "rows": 64, "direction": "forward"},
]
