"""One step of ``git bisect run``: measure at the commit that is checked out, and say old level or new level.

This file is run by path, with the standard library alone, in a worktree whose own code does the measuring: it must
work whatever the commit holds. Exit codes are those of ``git bisect run``: 0 old level, 1 new level, 125 cannot tell,
128 end the search.

    python -I bisect_step.py SPEC.json

The spec has ``command`` (what measures; ``{store}`` in it becomes an empty folder), ``match`` (keys that the wanted
record has), ``metric``, ``old``, ``new`` (levels), ``runs`` and ``log`` (a file that gets a line of JSON a step).
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OLD, NEW, SKIP = 0, 1, 125
#: Ends the search: the step itself is at fault, not the commit.
ABORT = 128


def measure(spec: dict[str, Any]) -> tuple[float | None, str]:
    """The metric's value in a run made here and now, or None and why."""
    with tempfile.TemporaryDirectory(prefix="pairbench-bisect-") as store:
        command = [part.replace("{store}", store) for part in spec["command"]]
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        for path in sorted(Path(store).rglob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                samples = record.get("samples") or {}
                flat = {**record, "clock": samples.get("clock"), "cache": samples.get("cache")}
                if all(flat.get(key) == value for key, value in spec["match"].items()):
                    entry = (record.get("metrics") or {}).get(spec["metric"])
                    if record.get("status") == "passed" and entry:
                        return float(entry["value"]), "passed"
                    return None, f"{record.get('status')}: {record.get('reason')}"
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return None, f"no such record; exit code {done.returncode}: {last[-1] if last else 'no output'}"


def nearer(value: float, old: float, new: float) -> int:
    """Which of the two levels a value belongs to, by ratio; ``SKIP`` in the fifth of the way around the middle."""
    share = math.log(value / old) / math.log(new / old)
    return SKIP if 0.4 < share < 0.6 else NEW if share >= 0.6 else OLD


def main(path: str) -> int:
    """Runs the step and gives its exit code."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    found, why = [], ""
    for _ in range(int(spec["runs"])):
        value, why = measure(spec)
        if value is not None and value > 0:
            found.append(value)
    middle = statistics.median(found) if found else None
    verdict = SKIP if middle is None else nearer(middle, spec["old"], spec["new"])
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    said = {OLD: "old", NEW: "new", SKIP: "skipped"}[verdict]
    line = {"commit": head, "values": found, "value": middle, "level": said, "reason": why}
    with open(spec["log"], "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
    shown = "nothing" if middle is None else f"{middle:.6g}"
    print(f"{head[:12]}: {shown} ({why}): {said} level", file=sys.stderr)
    return verdict


if __name__ == "__main__":
    try:
        code = main(sys.argv[1])
    except Exception as err:  # an exit code of 1 would say "new level"
        print(f"the step failed: {type(err).__name__}: {err}", file=sys.stderr)
        code = ABORT
    sys.exit(code)
