"""What asv costs beside pairbench itself: ``python3 -m benchmarks.asv_overhead [TECHNIQUE…] [--each family]``.

In a fresh clone of this checkout's commit, ``pairbench run`` and ``asv run HEAD^!`` measure the same techniques in
turn, each first in every other round, and what both took is added up: seconds on the clock, and seconds of CPU of all
their processes, which other work on the machine moves less. asv's first command of a clone makes its environment and
the commit's wheel, and that counts. Exits 1 when asv took more than :data:`BOUND` times as long, or left something out.

``--each`` says what one command measures: everything (``all``, what the bound is about), a ``family`` or a
``technique``. The smaller the part, the better asv looks: every ``pairbench run`` reads the sentinel twice, and asv's
techniques share their readings.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.history.store import Store
from harness.plan import TIER_HOLDS

ROOT = Path(__file__).resolve().parents[1]
BOUND = 1.3
Measured = frozenset[tuple[str, str, str]]
Run = Callable[[Sequence[str], Path, Mapping[str, str]], int]


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock and of CPU, children included."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)


@dataclass(frozen=True)
class Row:
    """One part, measured by both; codes: how the commands ended; left_out: what only one of them recorded."""

    part: str
    pairbench: Cost
    asv: Cost
    codes: tuple[int, int]
    left_out: tuple[str, ...] = ()


def parts(listed: Sequence[Mapping[str, Any]], each: str, tier: str) -> dict[str, list[str]]:
    """The techniques that one command measures, by the name of the part; those without a workload of the tier are not.

    listed: techniques as ``pairbench list --json`` prints them.
    """
    found: dict[str, list[str]] = {}
    for technique in listed:
        if any(w["tier"] in TIER_HOLDS[tier] for w in technique["workloads"]):
            part = {"all": "all", "family": technique["family"], "technique": technique["name"]}[each]
            found.setdefault(part, []).append(technique["name"])
    return found


def timed(run: Run, words: Sequence[str], place: Path, environment: Mapping[str, str]) -> tuple[Cost, int]:
    """What a command cost, and its exit code."""
    wall, cpu = time.monotonic(), _children_s()
    code = run(words, place, environment)
    return Cost(time.monotonic() - wall, _children_s() - cpu), code


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def call(words: Sequence[str], place: Path, environment: Mapping[str, str]) -> int:
    """Runs ``python -m`` words with this Python; what it prints goes to a file beside the clone."""
    with open(place.parent / "printed.txt", "a", encoding="utf-8") as printed:
        command = [sys.executable, "-m", *words]
        return subprocess.run(command, cwd=place, env=dict(environment), stdout=printed, stderr=printed).returncode


def compare(part: str, names: Sequence[str], tier: str, place: Path, asv_first: bool, run: Run = call) -> Row:
    """Measures the techniques once with each, in the clone at place, and looks at what both recorded."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ, "PAIRBENCH_TIER": tier}
    environment["PAIRBENCH_DATA"] = str(place.parent / "data")
    only = ["-b", rf"^\w+[.]({'|'.join(map(re.escape, names))})[.]"]
    commands = {
        "pairbench": ["harness", "run", *names, "--tier", tier],
        "asv": ["asv", "run", *only, "HEAD^!"],
    }
    costs, codes, seen = {}, {}, {}
    for tool in sorted(commands, reverse=not asv_first):
        with tempfile.TemporaryDirectory(dir=place.parent) as store:
            environment["PAIRBENCH_STORE"] = store
            words = commands[tool] + (["--store", store] if tool == "pairbench" else [])
            costs[tool], codes[tool] = timed(run, words, place, environment)
            seen[tool] = recorded(Path(store))
    missing = [f"{tool}: {' '.join(m)}" for tool in seen for m in sorted(frozenset.union(*seen.values()) - seen[tool])]
    if not seen["asv"]:
        missing.append("asv: everything")
    return Row(part, costs["pairbench"], costs["asv"], (codes["pairbench"], codes["asv"]), tuple(missing))


def recorded(store: Path) -> Measured:
    """Technique, workload and variant of every measurement in a store."""
    records = [r for r in Store(store).read() if r["type"] == "measurement"]
    return frozenset((r["technique"], r["workload"], r["variant"]) for r in records)


def table(rows: Sequence[Row]) -> list[str]:
    """A line a part and one for the sum."""
    lines = [f"{'seconds: wall, CPU':28}{'pairbench':>18}{'asv':>18}{'ratio':>14}"]
    for name, first, second in [*((r.part, r.pairbench, r.asv) for r in rows), ("sum", *sums(rows))]:
        seconds = [f"{c.wall_s:.1f}, {c.cpu_s:.1f}" for c in (first, second)]
        lines.append(f"{name:28}{seconds[0]:>18}{seconds[1]:>18}{_ratios(first, second):>14}")
    for row in rows:
        lines += [f"not measured by {what}" for what in row.left_out]
        if row.codes[0] not in (0, 3) or row.codes[1]:
            lines.append(f"{row.part}: pairbench ended with {row.codes[0]}, asv with {row.codes[1]}")
    return lines


def sums(rows: Sequence[Row]) -> tuple[Cost, Cost]:
    """What pairbench and asv took in all."""
    return sum((r.pairbench for r in rows), Cost()), sum((r.asv for r in rows), Cost())


def _ratios(first: Cost, second: Cost) -> str:
    pairs = ((second.wall_s, first.wall_s), (second.cpu_s, first.cpu_s))
    return ", ".join(f"{more / less:.2f}" if less else "–" for more, less in pairs)


def within(rows: Sequence[Row]) -> bool:
    """Whether asv measured the same and took at most :data:`BOUND` times as long, by the clock and by CPU."""
    first, second = sums(rows)
    fast = second.wall_s <= BOUND * first.wall_s and second.cpu_s <= BOUND * first.cpu_s
    return bool(rows) and fast and not any(r.left_out for r in rows)


def main(words: Sequence[str] | None = None) -> int:
    """The exit code."""
    ask = argparse.ArgumentParser(prog="benchmarks.asv_overhead", description=str(__doc__).partition("\n")[0])
    ask.add_argument("techniques", nargs="*", help="all when none is named")
    ask.add_argument("--each", choices=("all", "family", "technique"), default="all")
    ask.add_argument("--tier", choices=tuple(TIER_HOLDS), default="smoke")
    ask.add_argument("--rounds", type=int, default=2, help="how often each part is measured (default 2)")
    ask.add_argument("--json", action="store_true", help="print the rows as JSON")
    asked: Any = ask.parse_args(words)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pairbench-asv-") as folder:
        place = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(place)], check=True)
        told = subprocess.run(
            [sys.executable, "-m", "harness", "list", "--json"], cwd=place, check=True, stdout=subprocess.PIPE
        )
        listed = {t["name"]: t for t in json.loads(told.stdout)}
        if wrong := [name for name in asked.techniques if name not in listed]:
            ask.error(f"this commit has no technique {', '.join(wrong)}")
        chosen = parts([listed[name] for name in asked.techniques or listed], asked.each, asked.tier)
        call(["harness", "machine"], place, {**os.environ, "PAIRBENCH_DATA": str(Path(folder) / "data")})
        for turn in range(asked.rounds):
            for part, names in chosen.items():
                rows.append(compare(part, names, asked.tier, place, asv_first=bool(turn % 2)))
                print(table(rows[-1:])[1], file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows], indent=2) if asked.json else "\n".join(table(rows)))
    return 0 if within(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
