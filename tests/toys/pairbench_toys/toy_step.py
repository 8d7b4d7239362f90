"""A step on two ranks: a sum over ranks, by one collective or by gathering first."""

import os
import time

import torch
import torch.distributed as dist

from harness.pair import Claim, Pair, Tolerance, Variant, Work


def inputs(workload, ctx):
    return {"x": ctx.randn(4, workload.width)}


class Sum:
    def __init__(self, workload, ctx):
        self.ctx, self.sent = ctx, 0

    def load(self, inputs):
        x = inputs["x"]
        self.mine = x.chunk(self.ctx.world, dim=0)[self.ctx.rank].clone()
        self.out = torch.full((self.mine.shape[1],), float("nan"))

    def run(self):
        self.out = self.mine.sum(0)
        if self.ctx.world > 1:
            dist.all_reduce(self.out)
            self.sent = self.out.nbytes

    def result(self):
        return {"total": self.out}

    def counters(self):
        return {"link_bytes": float(self.sent)}


class Gathered(Sum):
    def run(self):
        every = [torch.empty_like(self.mine) for _ in range(self.ctx.world)]
        dist.all_gather(every, self.mine)
        self.out = torch.cat(every).sum(0)


class OneDies(Sum):
    def run(self):
        if self.ctx.rank == 1 and os.environ.get("PAIRBENCH_TOY_FAULT") == "die":
            os._exit(17)
        super().run()


class OneHangs(Sum):
    def run(self):
        if self.ctx.rank == 1 and os.environ.get("PAIRBENCH_TOY_FAULT") == "hang":
            time.sleep(600)
        super().run()


def work(workload):
    return Work(flops=4 * workload.width, link_bytes=4 * workload.width, items=1, unit="steps")


PAIR = Pair(
    name="toy_step",
    kind="step",
    layer="system",
    relieves="link",
    claim=Claim(throughput="higher", communication="lower"),
    inputs=inputs,
    oracle=Sum,
    variants={
        "baseline": Variant(Gathered, requires=("ranks>=2",)),
        "optimized": Variant(Sum, requires=("ranks>=2",)),
        "dies": Variant(OneDies, requires=("ranks>=2",)),
        "hangs": Variant(OneHangs, requires=("ranks>=2",)),
    },
    work=work,
    tolerance=Tolerance(rule="ranks"),
)

WORKLOADS = [{"name": "two", "tier": "smoke", "dtype": "float32", "width": 32, "ranks": 2}]
