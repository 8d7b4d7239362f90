"""What benchmarks/asv_overhead.py adds up and refuses, with commands that only pretend to measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import asv_overhead
from benchmarks.asv_overhead import Cost, Row, compare, parts, table, timed, within
from harness.history.store import Store

RECORD = {
    "schema": 1,
    "method": 1,
    "type": "measurement",
    "run": "r",
    "time": "2026-01-01T00:00:00.000Z",
    "commit": "c" * 40,
    "branch": "main",
    "dirty": False,
    "gpu": "cpu-x",
    "machine": "m",
    "family": "fusion",
    "kind": "op",
    "layer": "kernel",
    "variant": "baseline",
    "peer": "",
    "workload": "smoke_fwd",
    "workload_id": "abc",
    "dtype": "float32",
    "tier": "smoke",
    "ranks": 1,
    "status": "skipped",
    "reason": "pretended",
}


def pretend(pairbench: Sequence[str], asv: Sequence[str]) -> Callable[[Sequence[str], Path, Mapping[str, str]], int]:
    """Commands that leave a record of these techniques and end at once; each is kept in ``asked``."""

    def run(words: Sequence[str], place: Path, environment: Mapping[str, str]) -> int:
        asked.append((list(words), dict(environment)))
        tool = "asv" if words[0] == "asv" else "pairbench"
        writer = Store(environment["PAIRBENCH_STORE"]).open_run("cpu-x", "20260101T000000Z-00000000")
        for technique in {"asv": asv, "pairbench": pairbench}[tool]:
            writer.append({**RECORD, "id": f"r-{technique}", "technique": technique})
        writer.close()
        return 0

    asked: list[Any] = []
    vars(run)["asked"] = asked
    return run


def test_both_measure_the_same_techniques_of_the_same_clone_into_stores_of_their_own(tmp_path: Path) -> None:
    run = pretend(pairbench=["softmax", "rope"], asv=["softmax", "rope"])
    row = compare("fusion", ["softmax", "rope"], "smoke", tmp_path / "clone", asv_first=False, run=run)
    (first, env), (second, other) = vars(run)["asked"]
    assert first[:4] == ["harness", "run", "softmax", "rope"]
    assert second == ["asv", "run", "-b", r"^\w+[.](softmax|rope)[.]", "HEAD^!"]
    assert env["PAIRBENCH_TIER"] == other["PAIRBENCH_TIER"] == "smoke"
    assert env["PAIRBENCH_STORE"] != other["PAIRBENCH_STORE"]
    assert (row.part, row.codes, row.left_out) == ("fusion", (0, 0), ())
    compare("fusion", ["softmax"], "smoke", tmp_path / "clone", asv_first=True, run=run)
    assert [words[0] for words, _ in vars(run)["asked"]] == ["harness", "asv", "asv", "harness"]


def test_what_one_left_out_is_named_and_never_within_the_bound(tmp_path: Path) -> None:
    run = pretend(pairbench=["softmax", "rope"], asv=["softmax"])
    row = compare("fusion", ["softmax", "rope"], "smoke", tmp_path / "clone", asv_first=False, run=run)
    assert row.left_out == ("asv: rope smoke_fwd baseline",)
    assert not within([row])
    assert "not measured by asv: rope smoke_fwd baseline" in table([row])
    nothing = compare("fusion", ["rope"], "smoke", tmp_path / "clone", True, pretend(pairbench=[], asv=[]))
    assert not within([nothing])


@pytest.mark.parametrize(("asv", "fine"), [(Cost(13.0, 6.5), True), (Cost(13.1, 6.5), False), (Cost(13.0, 6.6), False)])
def test_the_bound_holds_for_the_sum_by_the_clock_and_by_cpu(asv: Cost, fine: bool) -> None:
    rows = [Row("a", Cost(4.0, 2.0), Cost(0.0, 0.0), (0, 0)), Row("b", Cost(6.0, 3.0), asv, (3, 0))]
    assert within(rows) is fine
    assert not within([])


def test_the_table_has_a_line_a_part_a_sum_and_how_a_command_failed() -> None:
    rows = [Row("a", Cost(4.0, 2.0), Cost(5.0, 2.5), (0, 0)), Row("b", Cost(6.0, 3.0), Cost(6.0, 3.0), (0, 2))]
    lines = table(rows)
    assert [line.split()[0] for line in lines[1:]] == ["a", "b", "sum", "b:"]
    assert lines[3].split()[1:] == ["10.0,", "5.0", "11.0,", "5.5", "1.10,", "1.10"]
    assert lines[4] == "b: pairbench ended with 0, asv with 2"


def test_a_part_is_everything_a_family_or_a_technique_with_a_workload_of_the_tier() -> None:
    tiers = {"softmax": ("fusion", "smoke"), "attention": ("attention", "smoke"), "rope": ("fusion", "smoke")}
    tiers["large"] = ("fusion", "quick")
    listed = [{"name": n, "family": family, "workloads": [{"tier": tier}]} for n, (family, tier) in tiers.items()]
    assert parts(listed, "all", "smoke") == {"all": ["softmax", "attention", "rope"]}
    assert parts(listed, "family", "smoke") == {"fusion": ["softmax", "rope"], "attention": ["attention"]}
    assert parts(listed, "technique", "quick") == {"large": ["large"]}


def test_time_is_that_of_the_command_and_of_its_children(tmp_path: Path) -> None:
    code = "import sys, time; sys.exit(sum(i * i for i in range(2 * 10**6)) % 2 + 5)"
    (tmp_path / "burn.py").write_text(code)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "burn.py").write_text(code)
    cost, exit_code = timed(asv_overhead.call, ["burn"], tmp_path / "inner", {"PATH": "/usr/bin:/bin"})
    assert exit_code in (5, 6)
    assert 0.02 < cost.cpu_s < 60
    assert cost.wall_s > 0.02
