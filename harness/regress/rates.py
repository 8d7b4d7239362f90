"""How often the detector errs: the figures of docs/detection.md, from made series and from a file of real noise.

python -m harness.regress.rates                            # alarms on noise alone, steps found in time
python -m harness.regress.rates --noise series.csv         # untouched and stepped series of real noise
python -m harness.regress.rates --noise series.csv --vary  # the same with each constant a fifth lower and higher
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import cast

import numpy as np

from harness.regress.detect import detect
from harness.regress.made import NULLS, Rng, lasting_speeds, made
from harness.regress.noise import Runs
from harness.regress.report import Direction
from harness.regress.rules import RULES, Rules

ALARM = 0.03  # a reported change of this size or more counts
NEAR = 3  # runs within which a step's place counts as found


@dataclass(frozen=True)
class Recorded:
    """A recorded series; ``at`` is where a step was put in, None where none was."""

    name: str
    better: Direction
    values: Runs
    at: int | None
    ratio: float


def read_noise(path: Path) -> list[Recorded]:
    """Series from a CSV with columns series, better, injected_at, injected_ratio, value."""
    rows: dict[str, list[dict[str, str]]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["series"], []).append(row)
    return [
        Recorded(
            name,
            cast(Direction, some[0]["better"]),
            np.array([float(row["value"]) for row in some]),
            int(some[0]["injected_at"]) if some[0]["injected_at"] else None,
            float(some[0]["injected_ratio"]),
        )
        for name, some in rows.items()
    ]


def changes(values: Runs, better: Direction = "lower", rules: Rules = RULES, alarm: float = ALARM) -> list[int]:
    """Where changes of at least ``alarm`` are reported."""
    events = detect([float(v) for v in values], better, rules=rules).events
    return [e.index for e in events if e.ratio is not None and abs(e.ratio - 1) >= alarm]


def null_alarms(
    make: Callable[[Rng, int], Runs], count: int, lengths: tuple[int, int], rules: Rules = RULES, seed: int = 2
) -> int:
    """In how many of ``count`` series of noise alone any change, of whatever size, is reported."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(lengths[0], lengths[1] + 1, count)
    return sum(bool(detect([float(v) for v in make(rng, int(n))], rules=rules).events) for n in sizes)


def steps_in_time(before: int, after: int, count: int, rules: Rules = RULES, size: float = 1.03) -> float:
    """Share of steps of 3 % in 0.5 % noise that are found when only ``after`` runs have been made since."""
    hits = 0
    for seed in range(count):
        factor = size if seed % 2 else 1 / size
        events = detect([float(v) for v in made([(before, 1.0), (after, factor)], seed=seed)], rules=rules).events
        hits += any(abs(e.index - before) <= NEAR for e in events)
    return hits / count


def on_record(series: list[Recorded], rules: Rules = RULES) -> tuple[int, dict[float, tuple[int, int]]]:
    """Alarms on the untouched series, and by size of step how many were found and how many there are."""
    alarms = 0
    found: dict[float, tuple[int, int]] = {}
    for one in series:
        places = changes(one.values, one.better, rules)
        if one.at is None:
            alarms += len(places)
            continue
        size = round(max(one.ratio, 1 / one.ratio), 2)
        hits, of = found.get(size, (0, 0))
        found[size] = (hits + any(abs(place - one.at) <= NEAR for place in places), of + 1)
    return alarms, dict(sorted(found.items()))


def put_into(series: list[Recorded], size: float, seed: int, rules: Rules = RULES) -> tuple[int, int]:
    """Steps put into each untouched series at a place of our own (10 runs from either end): found, and how many."""
    rng = np.random.default_rng(seed)
    hits = of = 0
    alarm = min(ALARM, (size - 1) / 2)
    for one in series:
        if one.at is not None:
            continue
        at = int(rng.integers(10, len(one.values) - 9))
        values = one.values.copy()
        values[at:] *= size if rng.random() < 0.5 else 1 / size
        hits += any(abs(place - at) <= NEAR for place in changes(values, one.better, rules, alarm))
        of += 1
    return hits, of


def varied(names: list[str]) -> list[tuple[str, Rules]]:
    """The rules as they are, and with each constant (or those named) a fifth lower and a fifth higher."""
    out = [("as they are", RULES)]
    for field in fields(Rules):
        if names and field.name not in names:
            continue
        value = getattr(RULES, field.name)
        if field.name in ("smallest", "noise_floor"):
            steps = (value / 2, value * 2)
        elif isinstance(value, int):
            steps = (value - max(1, value // 5), value + max(1, value // 5))
        else:
            steps = (round(value * 0.8, 3), round(value * 1.2, 3))
        out += [(f"{field.name} = {step:g}", replace(RULES, **{field.name: step})) for step in steps]
    return out


def series_half(series: list[Recorded], which: int) -> list[Recorded]:
    """Every other six series (in the file at hand: a machine), so that both parts have all kinds of series."""
    return [one for i, one in enumerate(series) if i // 6 % 2 == which]


def _print_noise(path: Path, vary: list[str] | None, count: int) -> None:
    series = read_noise(path)
    if vary is not None:
        print("| constant | alarms | 5 % | 10 % | own 5 % | step in 3 runs | worst noise, of", count, "|")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for name, rules in varied(vary):
            alarms, found = on_record(series, rules)
            own = put_into(series, 1.05, 1, rules)[0]
            worst = max((null_alarms(make, count, (20, 200), rules), kind) for kind, make in NULLS.items())
            quick = steps_in_time(20, 3, count, rules)
            hits = " | ".join(str(h) for h, _ in found.values())
            print(f"| {name} | {alarms} | {hits} | {own} | {quick:.0%} | {worst[0]} ({worst[1]}) |", flush=True)
        return
    for name, part in (
        ("all", series),
        ("some machines", series_half(series, 0)),
        ("the others", series_half(series, 1)),
    ):
        alarms, found = on_record(part)
        untouched = sum(one.at is None for one in part)
        print(f"{name}: {alarms} alarms on {untouched} untouched;", *(f"{s:g}: {h}/{n}" for s, (h, n) in found.items()))
    for size in (1.03, 1.05, 1.1, 1.2):
        runs = [put_into(series, size, seed) for seed in range(5)]
        print(f"own steps of {size:g}, five draws:", ", ".join(f"{h}/{n}" for h, n in runs), flush=True)


def _print_made(count: int) -> None:
    print("| noise | 20 to 200 runs | 20 to 40 runs |\n| --- | --- | --- |")
    lasting: dict[str, Callable[[Rng, int], Runs]] = {
        "two lasting speeds, switch 0.3": lambda rng, n: lasting_speeds(rng, n, 0.3),
        "two lasting speeds, switch 0.1": lambda rng, n: lasting_speeds(rng, n, 0.1),
    }
    for kind, make in (NULLS | lasting).items():
        long, short = (null_alarms(make, count, lengths) for lengths in ((20, 200), (20, 40)))
        print(f"| {kind} | {long} | {short} |", flush=True)
    print("\n| runs before | found with 3 after | with 5 |\n| --- | --- | --- |")
    for before in (8, 10, 15, 20, 30, 50, 100):
        print(
            f"| {before} | {steps_in_time(before, 3, count):.1%} | {steps_in_time(before, 5, count):.1%} |", flush=True
        )


def main() -> None:
    """Prints the tables; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m harness.regress.rates", description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=Path, help="a CSV of recorded series, some with known steps")
    parser.add_argument("--vary", nargs="*", metavar="CONSTANT", help="with each of these (or all) moved")
    parser.add_argument("--count", type=int, default=1000, help="made series of each kind")
    given = parser.parse_args()
    if given.noise:
        _print_noise(given.noise, given.vary, given.count)
    else:
        _print_made(given.count)


if __name__ == "__main__":
    main()
