"""Build, check and time the attention kernels side by side, in one call: ``python3 -m impls.attention.survey``.

With a GPU it runs each group of candidates in a process of its own under a time limit (a kernel that hangs costs its
group, not the call), checks each against float64 before timing it, times all of them in interleaved rounds beside
torch's kernels, and ends with one table. ``--out FOLDER`` (or $OUT) also keeps every sample as JSON.

Without one, ``--compile`` prints what the compiler makes of each candidate for a Hopper part (registers, spills,
shared memory, matrix instructions), and ``--tiny`` checks the candidates of Triton's interpreter and times nothing.

TFLOP/s follow the published convention: 4 · D a visible pair and head forward, 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from impls.attention.candidates import Candidate, candidates, launches, problem_for
from impls.attention.plain_attention import plain_attention, visible
from impls.attention.visible_pairs import visible_pairs
from kernels.flash_attention import flash_attention, flash_attention_backward, flash_attention_forward

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float16}  # the interpreter's bfloat16 products are garbage
TOKENS, WIDTH = 16384, 2048  # of a timed batch
PEERS = ("sdpa_flash", "sdpa_cudnn")
GROUPS = ("triton", "hopper")
# Batch, heads, queries, keys of a check: odd lengths, and more tiles of queries than a persistent kernel has programs.
CHECKED = {"cuda": (2, 48, 333, 517), "cpu": (1, 2, 33, 61)}


@dataclass
class Row:
    """What became of one candidate on one shape."""

    group: str
    name: str
    direction: str
    head_dim: int
    causal: bool
    seq: int
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    products: int | None = None
    check: str = ""
    tflops: float | None = None
    predicted: float | None = None
    why: str = ""
    samples_ms: list[float] = field(default_factory=list)


def compiled(candidate: Candidate, causal: bool, row: Row) -> None:
    """Fill in what the compiler says; the largest figure of the candidate's launches."""
    found = [launch.compile() for launch in launches(candidate, causal)]
    row.registers = max(r.registers for r in found)
    row.spills = sum(r.spills for r in found)
    row.shared = max(r.shared for r in found)
    row.products = sum(r.warpgroup_products for r in found)


def poison(like: list[torch.Tensor]) -> None:
    """Leave NaN in the memory that the next allocations of these sizes get: what a kernel fails to write shows."""
    held = [torch.full_like(t, float("nan"), dtype=d) for t in like for d in (t.dtype, torch.float32) for _ in range(4)]
    del held


def checked(candidate: Candidate, causal: bool, device: torch.device, shape: tuple[int, int, int, int]) -> str:
    """`right`, or what is wrong: twice the plain formula's error, or one rounding, against float64."""
    batch, heads, q_len, kv_len = shape
    dtype = DTYPE[device.type]
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    drawn = [
        torch.randn(batch, n, heads, candidate.head_dim, generator=generator).to(device, dtype)
        for n in (q_len, kv_len, kv_len, q_len)
    ]
    problem = problem_for(candidate.head_dim, causal, batch, heads, q_len, kv_len)
    mask = visible(q_len, kv_len, (None, problem.right), device)

    def run(fn: Callable[..., Any], wide: torch.dtype) -> dict[str, torch.Tensor]:
        q, k, v = (t.detach().to(wide, copy=True).requires_grad_() for t in drawn[:3])
        out = fn(q, k, v)
        if candidate.direction == "forward":
            return {"out": out.detach().double()}
        grads = torch.autograd.grad(out, (q, k, v), drawn[3].to(wide))
        return {f"d{n}": g.double() for n, g in zip("qkv", grads, strict=True)}

    exact = run(lambda q, k, v: plain_attention(q, k, v, mask), torch.float64)
    plain = run(lambda q, k, v: plain_attention(q, k, v, mask), dtype)
    poison(drawn)
    got = run(lambda q, k, v: flash_attention(q, k, v, causal=problem.right == 0, config=candidate.config), dtype)
    # Over few rows the plain formula's error on one gradient may be small by luck: pool the three.
    largest = {name: truth.abs().max().item() for name, truth in exact.items()}
    pooled = max((plain[name] - truth).abs().max().item() / largest[name] for name, truth in exact.items())
    for name, truth in exact.items():
        worst = (got[name] - truth).abs().max().item()
        bound = max(2 * pooled, UNIT[dtype]) * largest[name]
        if not worst <= bound:
            return f"wrong: {name} off by {worst:.3g}, allowed {bound:.3g}"
    return "right"


def call_for(row: Row, candidate: Candidate | None, tensors: list[torch.Tensor]) -> Callable[[], Any]:
    """The call to time; a candidate is None for one of torch's own. Backward starts from a forward done here."""
    from impls.attention import flash_attention as pair

    q, k, v, grad = tensors
    problem = problem_for(row.head_dim, row.causal, q.shape[0], q.shape[2], row.seq, row.seq)
    if candidate is None:
        peer: Callable[..., torch.Tensor] = getattr(pair, row.name)
        bounds = (None, problem.right)
        if row.direction == "forward":
            return lambda: peer(q, k, v, bounds)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        result = peer(*leaves, bounds)
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)
    config = candidate.config
    if row.direction == "forward":
        return lambda: flash_attention_forward(problem, q, k, v, config=config)
    out, lse = flash_attention_forward(problem, q, k, v)
    return lambda: flash_attention_backward(problem, q, k, v, out, lse, grad, config=config)


class DeviceClock:
    """Events around a call on a stream that is kept busy, so that the host's time before a launch is not in them."""

    def __init__(self) -> None:
        self.spin = 1_000_000  # cycles, about half a millisecond

    def ms(self, call: Callable[[], Any]) -> float:
        """Milliseconds between the events; measured again with a longer spin when the device had to wait."""
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            torch.cuda._sleep(self.spin)
            start.record()
            call()
            host_bound = start.query()
            end.record()
            torch.cuda.synchronize()
            if not host_bound:
                return float(start.elapsed_time(end))
            if self.spin >= 16_000_000:
                raise RuntimeError("the host takes longer to launch this than the device was kept busy for")
            self.spin *= 2


def timed(rows: list[tuple[Row, Candidate | None]], rounds: int, device: torch.device) -> None:
    """Interleaved rounds in random order, the device's time for each call, the median kept."""
    first = rows[0][0]
    batch, heads, dim = TOKENS // first.seq, WIDTH // first.head_dim, first.head_dim
    dtype = DTYPE[device.type]
    tensors = [torch.randn(batch, first.seq, heads, dim, device=device, dtype=dtype) for _ in range(4)]
    lanes = []
    for row, candidate in rows:
        try:
            call = call_for(row, candidate, tensors)
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            lanes.append((row, call))
        except Exception as error:
            row.check = f"error: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
    clock = DeviceClock()
    for _ in range(rounds):
        for row, call in random.sample(lanes, len(lanes)):
            row.samples_ms.append(clock.ms(call))
    pairs = visible_pairs(first.seq, first.seq, right=0 if first.causal else None) * batch * heads
    flops = 4 * dim * pairs * (1.0 if first.direction == "forward" else 2.5)
    for row, _ in lanes:
        row.tflops = flops / (statistics.median(row.samples_ms) * 1e-3) / 1e12


def asked_for(candidate: Candidate, parts: list[str]) -> bool:
    """Whether a candidate has one of `parts` in its name; without parts everything is asked for."""
    return not parts or any(part in candidate.name for part in parts)


def survey_group(group: str, args: argparse.Namespace, keep: Callable[[Row], None]) -> None:
    """Check each candidate of a group, then time the right ones beside the peers; `keep` gets each row once done."""
    cuda = torch.cuda.is_available() and not args.tiny
    device = torch.device("cuda" if cuda else "cpu")
    capability = torch.cuda.get_device_capability() if cuda else None
    ends = time.monotonic() + args.limit
    for direction, dim, causal in ((d, n, c) for n in args.dims for d in args.directions for c in (False, True)):
        every = candidates(dim, causal, direction, capability)
        chosen = [c for c in every if c.group == group and asked_for(c, args.only)]
        right: list[tuple[Row, Candidate]] = []
        for candidate in chosen:
            row = Row(
                group, candidate.name, direction, dim, causal, 0, predicted=candidate.predicted, why=candidate.why
            )
            if time.monotonic() > ends:
                row.check = "not reached in time"
                keep(row)
                continue
            try:
                if args.inspect and capability == (9, 0):
                    compiled(candidate, causal, row)
                row.check = checked(candidate, causal, device, CHECKED[device.type])
            except Exception as error:
                row.check = f"error: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
            if row.check == "right" and cuda:
                right.append((row, candidate))
            else:
                keep(row)
        for seq in args.seqs if right else ():
            shape = [(Row(**{**asdict(row), "seq": seq, "samples_ms": []}), c) for row, c in right]
            peers = [(Row("torch", p, direction, dim, causal, seq, check="peer"), None) for p in PEERS]
            if time.monotonic() > ends:
                for row, _ in shape:  # right, not timed
                    keep(row)
                continue
            lanes: list[tuple[Row, Candidate | None]] = [*shape, *peers]
            timed(lanes, args.rounds, device)
            for row, _ in lanes:
                keep(row)
        print(f"# {group} {direction} d={dim} {'causal' if causal else 'full'} done", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """One line a row, with the share of each peer's rate on the same shape in the same process."""
    lines = [
        f"{'shape':<24}{'kernel':<34}{'regs':>5}{'spill':>6}{'smem':>8}{'TFLOP/s':>9}"
        f"{'/cudnn':>8}{'/flash':>8}{'expected':>9}  check"
    ]
    rates = {(r.seq, r.head_dim, r.causal, r.direction, r.name): r.tflops for r in rows if r.group == "torch"}

    def text(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    for row in rows:
        key = (row.seq, row.head_dim, row.causal, row.direction)
        flash, cudnn = (rates.get((*key, peer)) for peer in PEERS)
        shares = [row.tflops / peer if row.tflops and peer else None for peer in (cudnn, flash)]
        shape = f"{row.direction[:3]} d{row.head_dim} {row.seq or '-'} {'causal' if row.causal else 'full'}"
        lines.append(
            f"{shape:<24}{row.name[:33]:<34}{text(row.registers, 'd'):>5}{text(row.spills, 'd'):>6}"
            f"{text(row.shared, 'd'):>8}{text(row.tflops, '.0f'):>9}{text(shares[0], '.2f'):>8}"
            f"{text(shares[1], '.2f'):>8}{text(row.predicted, '.2f'):>9}  {row.check}"
        )
    return "\n".join(lines)


def compile_rows(args: argparse.Namespace) -> list[Row]:
    """What the compiler makes of every candidate for a Hopper part; no GPU is needed."""
    rows = []
    for dim in args.dims:
        for direction in args.directions:
            for causal in (False, True):
                for candidate in candidates(dim, causal, direction, (9, 0)):
                    if not asked_for(candidate, args.only):
                        continue
                    row = Row(
                        candidate.group, candidate.name, direction, dim, causal, 0,
                        predicted=candidate.predicted, why=candidate.why,
                    )  # fmt: skip
                    try:
                        compiled(candidate, causal, row)
                        row.check = "compiled"
                    except Exception as error:
                        row.check = f"error: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
                    rows.append(row)
    return rows


def made_on(compiled: bool) -> dict[str, Any]:
    """When and on what a survey is made, as `impls.attention.outcomes` keeps it."""
    stack = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    gpu, timing = "sm_90" if compiled else "interpreter", "nothing was timed"
    if torch.cuda.is_available() and not compiled:
        gpu = torch.cuda.get_device_name().lower().replace(" ", "-")
        stack |= {"cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}
        timing = "events on a stream kept busy"
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"time": now, "gpu": gpu, "stack": stack, "timing": timing}


def in_child(group: str, argv: list[str], limit: float) -> list[Row]:
    """Run a group in a process of its own; on a crash or a hang one more row says so, beside what was done by then."""
    command = [sys.executable, "-m", "impls.attention.survey", *argv, "--child", group, "--limit", str(limit)]
    ending = ""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=limit + 60)
        printed = done.stdout
        if done.returncode:
            ending = f"error: the process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed, ending = error.stdout or b"", f"error: no end after {limit + 60:.0f} s, killed"
    lines = printed.decode().split("\n")[:-1]  # what follows the last line end is torn
    rows = [Row(**json.loads(line)) for line in lines if line.startswith("{")]
    if ending:
        rows.append(Row(group, "the rest", "", 0, False, 0, check=ending))
    return rows


def main(argv: list[str] | None = None) -> int:
    """The command; returns 1 when a candidate was wrong or failed."""
    given = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python3 -m impls.attention.survey", description=__doc__)
    parser.add_argument("--compile", action="store_true", help="only compile, for a Hopper part")
    parser.add_argument("--inspect", action="store_true", help="say what the compiler made of each, too: twice as slow")
    parser.add_argument("--tiny", action="store_true", help="only check, in Triton's interpreter")
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--seqs", type=int, nargs="*", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--directions", nargs="+", default=["forward", "backward"], choices=["forward", "backward"])
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="candidates with one of these in the name"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit", type=float, default=220.0, help="seconds a group may take")
    parser.add_argument("--out", default=os.environ.get("OUT"), help="folder for survey.json")
    parser.add_argument("--child", choices=GROUPS, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    if args.child:
        survey_group(args.child, args, lambda row: print(json.dumps(asdict(row)), flush=True))
        return 0
    rows: list[Row] = []
    if args.compile:
        rows = compile_rows(args)
    elif args.tiny:
        survey_group("triton", args, rows.append)
    elif torch.cuda.is_available():
        rows = [row for group in args.groups for row in in_child(group, given, args.limit)]
    else:
        print(
            "no GPU here: --compile shows what the compiler makes of the kernels, --tiny checks them", file=sys.stderr
        )
        return 2
    if args.out:
        Path(args.out).mkdir(parents=True, exist_ok=True)
        made = {**made_on(compiled=args.compile), "rows": [asdict(row) for row in rows]}
        (Path(args.out) / "survey.json").write_text(json.dumps(made, indent=1) + "\n")
    print(table(rows))
    return int(any(row.check.startswith(("wrong", "error")) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
