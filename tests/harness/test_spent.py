"""Where a run's seconds went is added up once, kept with the run, and printed by who shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from harness.commands import inspect
from harness.history.store import Store
from harness.history.verify import verify
from harness.plan import Request
from harness.report import Reporter
from harness.runner import Runner
from harness.session import Options, Session
from harness.spent import spent

ONE = {"technique": "t", "workload": "w", "ranks": 1}
RECORDS: list[dict[str, Any]] = [
    {**ONE, "costs": {"sampling_s": 2.0, "energy_s": 1.0, "check_s": 5.0, "compile_s": 0.25, "memory_s": 0.125}},
    {**ONE, "costs": {"sampling_s": 2.0, "energy_s": 1.5}},
    {**ONE, "workload": "v", "costs": {"sampling_s": 0.5}},
    {**ONE, "workload": "u"},
]
PARTS = {
    "total_s": 20.5,
    "sampling_s": 2.5,
    "energy_s": 2.5,
    "check_s": 5.0,
    "compile_s": 0.25,
    "memory_s": 0.125,
    "outside_share": 0.5,
}


def test_a_workloads_sampling_counts_once_and_energy_is_timed_too() -> None:
    """Of 51 s of a full run 16 were readings of energy, and were told as overhead."""
    assert spent(RECORDS, 20.5) == PARTS
    assert spent([], 0.0)["outside_share"] == 0.0


class Watched:
    """A machine that reads a sentinel at its end, or none."""

    ceilings = None
    says: ClassVar[dict[str, Any] | None] = None

    def __init__(self, *where: Any) -> None: ...

    def begin(self) -> None: ...

    def end(self) -> dict[str, Any] | None:
        return self.says


class Carried(Watched):
    pass


class Read(Watched):
    says: ClassVar[dict[str, Any] | None] = {"reading": {"matmul_s": 0.1, "copy_s": 0.1}, "moved": False}


@pytest.mark.parametrize(
    ("watch", "timing", "kind"), [(Read, True, "sentinel"), (Carried, True, "end"), (Read, False, "end")]
)
def test_the_last_line_of_a_run_keeps_what_it_spent_and_show_prints_the_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: Any, timing: bool, kind: str
) -> None:
    monkeypatch.setattr(Runner, "run", lambda self, items: self.records)
    store = str(tmp_path / "store")
    asked = Options("cpu", store=store, timing=timing)
    done = Session(Request(names=["add_rms_norm"], tier="smoke"), asked, Reporter(quiet_table=True), watch=watch).run()
    lines = [json.loads(x) for p in Path(store).rglob("*.jsonl") for x in p.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["run", kind]
    assert set(lines[-1]["spent"]) == set(PARTS)
    assert lines[-1]["spent"]["total_s"] > 0
    assert verify([Store(store)]).findings == []
    app = typer.Typer()
    inspect.register(app)
    shown = CliRunner().invoke(app, ["show", done.run, "--store", store])
    assert shown.exit_code == 0, shown.output
    assert "spent: 100% of 0 s outside sampling, checks and compilation (total" in shown.output
