"""A serve run: requests whose tokens count up from the prompt, one at a time or several at once."""

import time

from harness.pair import Claim, Pair, Tolerance, Work


def inputs(workload, ctx):
    start = ctx.seed % 50
    return {"requests": [(f"r{i}", [start + i, i + 1], workload.new) for i in range(workload.requests)]}


class OneByOne:
    together = 1

    def __init__(self, workload, ctx):
        self.tokens, self.events = {}, []

    def load(self, inputs):
        self.requests = inputs["requests"]
        self.tokens, self.events = {}, []

    def run(self):
        begin = time.perf_counter()
        self.tokens, self.events = {}, []
        for at in range(0, len(self.requests), self.together):
            batch = self.requests[at : at + self.together]
            times = {name: [] for name, _, _ in batch}
            for name, _, _ in batch:
                self.tokens[name] = []
            for step in range(max(new for _, _, new in batch)):
                time.sleep(0.0005)
                for name, prompt, new in batch:
                    if step < new:
                        self.tokens[name].append(sum(prompt) + step)
                        times[name].append(time.perf_counter() - begin)
            for name, prompt, _ in batch:
                self.events.append(
                    {
                        "id": name,
                        "arrival": 0.0,
                        "first_token": times[name][0],
                        "token_times": times[name],
                        "finish": times[name][-1],
                        "status": "finished",
                        "prompt_tokens": len(prompt),
                        "output_tokens": len(times[name]),
                    }
                )
        self.span = time.perf_counter() - begin

    def result(self):
        return self.tokens

    def timeline(self):
        return {"requests": self.events, "start": 0.0, "end": self.span}


class Batched(OneByOne):
    together = 4


class LosesOne(Batched):
    def result(self):
        return {name: tokens for name, tokens in self.tokens.items() if name != "r2"}


def work(workload):
    return Work(items=workload.requests * workload.new, unit="tokens")


PAIR = Pair(
    name="toy_serve",
    kind="serve",
    layer="system",
    relieves="capacity",
    claim=Claim(throughput="higher"),
    inputs=inputs,
    oracle=OneByOne,
    variants={"baseline": OneByOne, "optimized": Batched, "loses": LosesOne},
    work=work,
    tolerance=Tolerance(rule="tokens"),
)

WORKLOADS = [{"name": "eight", "tier": "smoke", "dtype": "float32", "requests": 8, "new": 3}]
