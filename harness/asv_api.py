"""What suites call under asv: one function, frozen, because suites come from the working tree and this from a commit.

A newer suite meets an older harness whenever asv measures the past. Whatever this harness does not know raises
NotImplementedError, which the suite shows as n/a with the reason. Imports no torch.
"""

from __future__ import annotations

import ast
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.discover import Technique, find, techniques
from harness.errors import UsageError, unknown
from harness.record import METHOD
from harness.workload import RESERVED, TIERS, parse_workloads

API: Final = 1
#: ``quick`` (least samples, nothing kept) or ``dry`` (nothing kept); asv's plugin sets it from asv's own options.
MODE = "PAIRBENCH_ASV_MODE"
QUICK_SAMPLES = 3


def measure(
    technique: str,
    workload: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    store: str | None = None,
    api: int = API,
) -> dict[str, float | str]:
    """Measures workloads of one technique as ``pairbench run`` does, in a process of its own, and keeps the records.

    Args:
        technique: its name.
        workload: one workload or several, as the suite writes them.
        store: folder or URL of the history; ``PAIRBENCH_STORE`` when None, else the user's own. The commit of the
            records is the one that asv installed.
        api: the form of this call that the suite was written for.

    Returns:
        ``workload/variant/metric`` → the figure, in the metric's own unit and direction; where there is none, the
        reason as text. ``workload/variant/status`` → the state, with its reason behind a colon. ``method`` → the
        method version.

    Raises:
        NotImplementedError: another ``api``, a technique, dimension, dtype or tier that this commit does not know.
        PairbenchError: the machine, the store or the technique's file is at fault.
    """
    if api != API:
        raise NotImplementedError(f"this commit's harness speaks api {API}, and the suite asks for {api}")
    raws = [dict(workload)] if isinstance(workload, Mapping) else [dict(w) for w in workload]
    known = techniques()
    if technique not in known:
        raise NotImplementedError(f"at this commit: {unknown('technique', technique, known)}")
    _refuse_unknown(find(technique), raws)
    return _flat(_run(technique, raws, store))


def _refuse_unknown(technique: Technique, raws: Sequence[Mapping[str, Any]]) -> None:
    """An unknown dimension would be left out in silence, and something else measured under the workload's name."""
    try:
        parse_workloads(technique.name, raws, f"the suite of {technique.name}")
    except UsageError as err:
        raise NotImplementedError(f"at this commit: {err}") from err
    own = Path(__file__).resolve().parents[1] / "suites" / technique.family / f"{technique.name}.py"
    if not own.exists():
        return
    words = written_in(own, *own.parent.glob("_*.py"), *own.parents[1].glob("_*.py"))
    for raw in raws:
        for key in raw:
            if key not in RESERVED and key not in words:
                raise NotImplementedError(f"at this commit {technique.name} has no dimension {key!r}")


def written_in(*suites: Path) -> set[str]:
    """Every string and keyword in a suite and the files it shares: what they do not contain is no dimension of its."""
    nodes = [node for path in suites for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    words = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return words | {n.arg for n in nodes if isinstance(n, ast.keyword) and n.arg}


def _run(technique: str, raws: Sequence[Mapping[str, Any]], store: str | None) -> Sequence[Mapping[str, Any]]:
    from harness.asv_machine import CarriedMachine, Unwatched
    from harness.commands.options import device
    from harness.plan import Request
    from harness.report import Reporter
    from harness.session import Options, Session

    mode = os.environ.get(MODE, "")
    budget = os.environ.get("PAIRBENCH_BUDGET")
    highest = max((str(raw["tier"]) for raw in raws), key=TIERS.index)
    options = Options(
        device=device("auto"),
        store=store or os.environ.get("PAIRBENCH_STORE") or None,
        keep=not mode,
        samples=QUICK_SAMPLES if mode == "quick" else None,
        budget_s=float(budget) if budget else None,
        argv=("asv", technique),
    )
    with tempfile.TemporaryDirectory(prefix="pairbench-") as folder:
        path = Path(folder) / "workloads.json"
        path.write_text(json.dumps(list(raws), allow_nan=False), encoding="utf-8")
        request = Request(names=(technique,), tier=highest, workload_file=path)
        watch = Unwatched if mode == "quick" else CarriedMachine
        return Session(request, options, Reporter(quiet_table=True), watch=watch).run().records


def _flat(records: Sequence[Mapping[str, Any]]) -> dict[str, float | str]:
    flat: dict[str, float | str] = {"method": float(METHOD)}
    for record in records:
        place = f"{record['workload']}/{record['variant']}"
        flat[f"{place}/status"] = ": ".join(str(record[k]) for k in ("status", "reason") if record[k])
        for name, why in record["missing"].items():
            flat[f"{place}/{name}"] = str(why)
        for name, entry in record["metrics"].items():
            flat[f"{place}/{name}"] = float(entry["value"])
    return flat
