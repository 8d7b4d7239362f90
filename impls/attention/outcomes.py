"""Keep surveys of the attention kernels, and fill the tables of docs/attention.md from those that were kept.

    python3 -m impls.attention.outcomes --keep FOLDER/survey.json     # under results/surveys/<gpu>/<UTC time>.json
    python3 -m impls.attention.outcomes --write docs/attention.md

A table's rows are the candidates, and what was measured of kernels that are no candidates any more, marked as such. A
figure is the newest that was kept: the rate, and its share of cuDNN's and of FlashAttention-2's in the same process on
the same shape. The prediction is the one that the survey carried when it was measured. What was not measured says so.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from impls.attention import schedule
from impls.attention.candidates import candidates, is_picked

FOLDER = Path(__file__).parents[2] / "results" / "surveys"
SEQ = 4096  # of the tables
DIMS = (128, 64, 256)
UNKNOWN = "not yet measured"
REMOVED = " *tried, removed*"
Key = tuple[str, int, bool, str]  # direction, head dimension, causal, name


@dataclass(frozen=True)
class Survey:
    """One kept file: when and on what it was made, and its rows."""

    path: Path
    time: str
    gpu: str
    stack: dict[str, str]
    rows: list[dict[str, Any]]
    timing: str


def read(path: Path) -> Survey:
    """A survey; ValueError when the file does not say when and on what it was made."""
    found = json.loads(path.read_text(encoding="utf-8"))
    missing = [k for k in ("time", "gpu", "stack", "rows") if not (isinstance(found, dict) and found.get(k))]
    if missing:
        raise ValueError(f"{path}: it does not hold {', '.join(missing)}; a survey says when and on what it was made")
    return Survey(path, found["time"], found["gpu"], found["stack"], found["rows"], found.get("timing", ""))


def kept(folder: Path = FOLDER) -> list[Survey]:
    """Every kept survey, the oldest first."""
    return sorted((read(path) for path in folder.glob("*/*.json")), key=lambda survey: survey.time)


def keep(path: Path, folder: Path = FOLDER) -> Path:
    """Copy a survey under its GPU and time; nothing is overwritten."""
    survey = read(path)
    target = folder / survey.gpu / f"{re.sub('[-:]', '', survey.time)}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("x", encoding="utf-8") as file:
        file.write(path.read_text(encoding="utf-8"))
    return target


def is_failed(row: dict[str, Any]) -> bool:
    """Whether a kernel was found wrong or did not run; of length 0 that was in the check, before any timing."""
    return bool(row["check"].startswith(("wrong", "error")))


def newest(surveys: Iterable[Survey], compiled: bool) -> dict[Key, tuple[Survey, dict[str, Any]]]:
    """The newest row of each kernel: of the compiler's, or of those that ran on a device with the tables' length."""
    found = {}
    for survey in surveys:
        for row in survey.rows:
            ran = row["seq"] == SEQ or (row["seq"] == 0 and is_failed(row))
            if row["group"] != "torch" and (row["registers"] is not None if compiled else ran):
                found[(row["direction"], row["head_dim"], row["causal"], row["name"])] = (survey, row)
    return found


def outcome(survey: Survey, row: dict[str, Any], mark: str) -> str:
    """A cell: the rate and its shares of the peers in the same process, or what became of the kernel."""
    if row["check"] != "right":
        return f"{row['check']} [{mark}]"
    if row["tflops"] is None:
        return f"right, not timed [{mark}]"
    same = ("direction", "head_dim", "causal", "seq")
    peers = {
        other["name"]: other["tflops"]
        for other in survey.rows
        if other["group"] == "torch" and all(other[k] == row[k] for k in same) and other["tflops"]
    }
    shares = [
        f", {row['tflops'] / peers[name]:.2f} of {said}"
        for name, said in (("sdpa_cudnn", "cuDNN"), ("sdpa_flash", "FA2"))
        if name in peers
    ]
    return f"{row['tflops']:.0f}{''.join(shares)} [{mark}]"


def lengths_table(surveys: list[Survey], marks: dict[Path, str]) -> list[str]:
    """What `flash_attention` and Triton pick, over the peers at each length, as Markdown."""
    found = newest_by_length(surveys)
    seqs = sorted({key[-1] for key in found} - {0})
    lines = [f"| kernel | {' | '.join(f'S={seq}' for seq in seqs)} |", f"| --- |{' --- |' * len(seqs)}"]
    for direction, dim, causal in ((d, n, c) for d in ("forward", "backward") for n in DIMS for c in (False, True)):
        for i, candidate in enumerate(candidates(dim, causal, direction, (9, 0))):
            cells = []
            for seq in seqs:
                key = (direction, dim, causal, candidate.name)
                last = found.get((*key, seq)) or found.get((*key, 0))
                cells.append(outcome(*last, marks[last[0].path]) if last else UNKNOWN)
            picked = [seq for seq in seqs if is_picked(candidate, causal, seq)]
            if picked or (i == 0 and any(cell != UNKNOWN for cell in cells)):
                where = "" if picked == seqs else f" at S={', '.join(map(str, picked))}"
                what = f"{direction}, D={dim}, {'causal' if causal else 'full'}: {candidate.name}"
                lines.append(f"| {what}{f' **picked{where}**' if picked else ''} | {' | '.join(cells)} |")
    return lines


def newest_by_length(surveys: Iterable[Survey]) -> dict[tuple[str, int, bool, str, int], tuple[Survey, dict[str, Any]]]:
    """The newest row of each kernel that was timed or failed, with the length as the last part of its key.

    A kernel that failed its check has no figure at any length until a later survey times it there: one row of length 0.
    """
    found: dict[tuple[str, int, bool, str, int], tuple[Survey, dict[str, Any]]] = {}
    for survey in surveys:
        for row in survey.rows:
            if row["group"] != "torch" and (row["tflops"] or is_failed(row)):
                key = (row["direction"], row["head_dim"], row["causal"], row["name"])
                if row["seq"] == 0:
                    found = {old: value for old, value in found.items() if old[:4] != key}
                found[(*key, row["seq"])] = (survey, row)
    return found


def newest_peers(surveys: Iterable[Survey]) -> dict[Key, tuple[Survey, dict[str, Any]]]:
    """The newest row of each of torch's kernels on the tables' length."""
    return {
        (row["direction"], row["head_dim"], row["causal"], row["name"]): (survey, row)
        for survey in surveys
        for row in survey.rows
        if row["group"] == "torch" and row["seq"] == SEQ and row["tflops"]
    }


def peers_table(surveys: list[Survey], marks: dict[Path, str]) -> list[str]:
    """What torch's kernels reached, as Markdown."""
    found = newest_peers(surveys)
    lines = ["| TFLOP/s | FA2 full | FA2 causal | cuDNN full | cuDNN causal |", "| --- | --- | --- | --- | --- |"]
    for direction, dim in ((d, n) for d in ("forward", "backward") for n in DIMS):
        cells = [UNKNOWN] * 4
        for i, (name, causal) in enumerate((n, c) for n in ("sdpa_flash", "sdpa_cudnn") for c in (False, True)):
            if (direction, dim, causal, name) in found:
                survey, row = found[(direction, dim, causal, name)]
                cells[i] = f"{row['tflops']:.0f} [{marks[survey.path]}]"
        lines.append(f"| {' | '.join([f'{direction}, D={dim}', *cells])} |")
    return lines


def source(survey: Survey, mark: str) -> str:
    """A line that says when and on what a survey was made, and how far its samples lie apart."""
    timed = [row["samples_ms"] for row in survey.rows if row["samples_ms"]]
    stack = ", ".join(f"{name} {version}" for name, version in survey.stack.items())
    line = f"- [{mark}] {survey.time}, {survey.gpu}, {stack}"
    if timed:
        rounds = sorted({len(samples) for samples in timed})
        apart = statistics.median((max(s) - min(s)) / statistics.median(s) for s in timed)
        line += f"; medians of {' or '.join(map(str, rounds))} rounds, {apart:.0%} from the fastest to the slowest"
        line += f"; {survey.timing}"
    return f"{line} (`results/surveys/{survey.gpu}/{survey.path.name}`)"


def both(values: tuple[Any, Any]) -> str:
    """Full and causal in one cell: once where they agree."""
    said = ["–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.2f}" for value in values]
    return said[0] if said[0] == said[1] else f"{said[0]} / {said[1]}"


def table(direction: str, surveys: list[Survey], marks: dict[Path, str]) -> list[str]:
    """The rows of one direction, as Markdown."""
    ran, built = newest(surveys, compiled=False), newest(surveys, compiled=True)
    lines = [
        "| kernel | regs | spills | shared | products | expected, why | full: TFLOP/s | causal: TFLOP/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for dim in DIMS:
        now = {causal: {c.name: c for c in candidates(dim, causal, direction, (9, 0))} for causal in (False, True)}
        past = [key[3] for key in ran if key[:2] == (direction, dim)]
        for name in dict.fromkeys([*now[False], *now[True], *past]):
            keys = [(direction, dim, causal, name) for causal in (False, True)]
            made = [built[key][1] if key in built else {} for key in keys]
            cells = [both((made[0].get(k), made[1].get(k))) for k in ("registers", "spills", "shared", "products")]
            predicted, whys, outcomes, picks = [], [], [], []
            for key in keys:
                candidate = now[key[2]].get(name)
                row = ran[key][1] if key in ran else None
                predicted.append(row["predicted"] if row else candidate.predicted if candidate else None)
                whys.append(row["why"] if row else candidate.why if candidate else "")
                outcomes.append(outcome(*ran[key], marks[ran[key][0].path]) if key in ran else UNKNOWN)
                picks.append(candidate is not None and is_picked(candidate, key[2]))
                if candidate is None and row is None:
                    outcomes[-1] = "–"
            chosen = {(True, True): " **picked**", (True, False): " **picked, full**"}.get((picks[0], picks[1]), "")
            chosen = " **picked, causal**" if picks == [False, True] else chosen
            if not any(picks) and name in (next(iter(now[False])), next(iter(now[True]))):
                chosen = " **Triton's choice**"
            if name not in now[False] and name not in now[True]:
                chosen = REMOVED
            expected = both((predicted[0], predicted[1])) + ": " + (whys[0] or whys[1])
            lines.append(f"| {' | '.join([f'D={dim} {name}{chosen}', *cells, expected, *outcomes])} |")
    return lines


def fill(text: str, surveys: list[Survey]) -> str:
    """The page with every part between `<!-- surveys: PART -->` and `<!-- end -->` made again from the surveys."""
    figures = (newest(surveys, True), newest(surveys, False), newest_peers(surveys), newest_by_length(surveys))
    shown = {survey.path for found in figures for survey, _ in found.values()}
    used = [survey for survey in surveys if survey.path in shown]
    marks = {survey.path: chr(ord("a") + i) for i, survey in enumerate(used)}
    parts = {
        "forward": table("forward", surveys, marks),
        "backward": table("backward", surveys, marks),
        "peers": peers_table(surveys, marks),
        "lengths": lengths_table(surveys, marks),
        "balance": schedule.table(),
        "sources": [source(survey, marks[survey.path]) for survey in used],
    }

    def made(match: re.Match[str]) -> str:
        if match[1] not in parts:
            raise ValueError(f"surveys: {match[1]} is no part; there are {', '.join(parts)}")
        return f"<!-- surveys: {match[1]} -->\n" + "\n".join(parts[match[1]]) + "\n<!-- end -->"

    return re.sub(r"<!-- surveys: (\w+) -->\n.*?<!-- end -->", made, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python3 -m impls.attention.outcomes", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="a survey.json to keep")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="the page whose tables are made again")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where surveys are kept")
    args = parser.parse_args(argv)
    if args.keep is None and args.write is None:
        parser.error("nothing to do: --keep FILE or --write PAGE")
    if args.keep is not None:
        print(keep(args.keep, args.folder))
    if args.write is not None:
        text = args.write.read_text(encoding="utf-8")
        args.write.write_text(fill(text, kept(args.folder)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
