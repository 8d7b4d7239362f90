"""Two selections side by side: ratios, verdicts, and what one of them lacks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from harness.errors import UsageError
from harness.history.store import Store
from harness.regress import cli_history
from harness.regress.compare import Compared, compare, select, verdict_of


def row(compared: Compared, variant: str = "optimized", metric: str = "latency") -> dict[str, Any]:
    return next(r for r in compared.series if (r["variant"], r["metric"]) == (variant, metric))


def side(*values: float, width: float | None = None) -> dict[str, Any]:
    return {"values": list(values), "width": width}


def test_a_change_between_two_commits_has_size_interval_and_verdict(world: Any) -> None:
    world.nights(10)
    world.nights(1, optimized=1.2e-3)
    with world.history() as history:
        done = compare(history, world.commits[9][:10], "main")
        slow = row(done)
        assert slow["verdict"] == "regressed"
        assert slow["ratio_low"] <= 1.2 <= slow["ratio_high"]
        assert (slow["a"]["n"], slow["b"]["n"]) == (1, 1)
        assert row(done, metric="speedup")["verdict"] == "regressed"
        assert row(done, "baseline")["verdict"] == "unchanged"
        assert done.series[0]["ratio"] in (slow["ratio"], row(done, metric="speedup")["ratio"])
        back = compare(history, "main", world.commits[9])
        assert row(back)["verdict"] == "improved"
        assert row(back)["ratio"] == pytest.approx(1 / slow["ratio"])


def test_the_geometric_mean_is_over_what_both_have(world: Any) -> None:
    first = world.commit("first")
    run_a = world.run(first)
    second = world.commit("second")
    run_b = world.run(second, optimized=1.5e-3)
    extra = world.record("liger", 1e-3, "r900", first)
    lost = world.record("liger", 1e-3, "r901", second, status="oom", reason="24 GiB wanted", metrics={})
    new = world.record("hopper", 1e-3, "r901", second)
    for run, records in (("r900", [extra]), ("r901", [lost, new])):
        with Store(world.store).open_run("h200", run) as writer:
            for record in records:
                writer.append(record)
    with world.history() as history:
        done = compare(history, first, second, ["latency"])
        mean = done.means["latency"]
        ratios = [r["ratio"] for r in done.series]
        assert mean["n"] == 2
        assert mean["ratio"] == pytest.approx(math.prod(ratios) ** 0.5)
        assert [(r["variant"], r["there"], r["reason"]) for r in done.only_a] == [("liger", "oom", "24 GiB wanted")]
        assert [(r["variant"], r["there"]) for r in done.only_b] == [("hopper", "not run")]
        by_run = compare(history, run_a, run_b, ["latency"])
        assert [r["ratio"] for r in by_run.series] == ratios
        assert by_run.only_a == []


def test_a_tag_a_branch_and_what_was_never_measured(world: Any) -> None:
    world.nights(2)
    world.git("tag", "v1", world.commits[0])
    world.git("checkout", "-q", "-b", "feature")
    world.commit("measured nowhere")
    with world.history() as history:
        assert select(history, "v1").filters == {"commit": world.commits[0]}
        near = select(history, "feature")
        assert near.filters == {"commit": world.commits[1]}
        assert "newest recorded" in near.describes
        assert select(history, "torch:2.11.0").filters == {"torch": "2.11.0"}
        with pytest.raises(UsageError, match=r"did you mean 2\.11\.0"):
            select(history, "torch:2.11.1")
        with pytest.raises(UsageError, match="unknown commit, branch, tag or run"):
            select(history, "nowhere")
        with pytest.raises(UsageError, match="metric"):
            compare(history, "v1", "main", ["latencies"])


def test_a_branch_is_its_own_newest_clean_commit(world: Any) -> None:
    world.nights(3)
    own = world.commits[-1]
    world.git("checkout", "-q", "-b", "side")
    side = world.commit("side")
    world.run(side, optimized=2e-3)
    world.git("checkout", "-q", "main")
    world.git("merge", "-q", "--no-ff", "-m", "merge", "side")
    edited = world.commit("edited")
    world.run(edited, optimized=3e-3, dirty=True)
    with world.history() as history:
        assert select(history, "side").filters == {"commit": side}
        chosen = select(history, "main")
    assert chosen.filters == {"commit": own}
    assert chosen.describes == f"commit {own[:12]}, the newest of a clean tree on main"
    world.git("checkout", "-q", "--orphan", "apart")
    lone = world.commit("lone")
    world.run(lone, dirty=True)
    with world.history("apart") as history:
        assert select(history, lone).describes == f"commit {lone[:12]}, measured in dirty trees only"
    world.run("e" * 40, dirty=True)  # of another repository
    with world.history("apart") as history:
        assert select(history, "e" * 12).describes == f"commit {'e' * 12}, measured in dirty trees only"


def test_two_gpu_types_and_two_stacks(world: Any) -> None:
    world.nights(3)
    world.nights(3, gpu="l40s", optimized=2e-3, stack={"torch": "2.12.0"})
    with world.history() as history:
        done = compare(history, "gpu:h200", "gpu:l40s", ["latency"])
        assert len(done.series) == 2
        assert row(done)["ratio"] == pytest.approx(2.0, rel=0.02)
        assert (
            compare(history, "torch:2.11.0", "torch:2.12.0").series == []
        )  # of different GPU types: nothing in common


def test_dirty_trees_are_on_neither_side(world: Any) -> None:
    world.nights(3)
    for _ in range(3):
        world.run(world.commits[2], optimized=9e-3, dirty=True)
    with world.history() as history:
        assert row(compare(history, world.commits[0], world.commits[2]))["verdict"] == "unchanged"


@pytest.mark.parametrize(
    ("a", "b", "better", "noise", "verdict"),
    [
        (side(1.0, 1.001, 0.999), side(1.1, 1.101, 1.099), "lower", None, "regressed"),
        (side(1.0, 1.001, 0.999), side(1.1, 1.101, 1.099), "higher", None, "improved"),
        (side(1.0, 1.001, 0.999), side(1.0, 1.001, 1.002), "lower", None, "unchanged"),
        (side(1.0), side(1.03), "lower", None, "unchanged"),  # one run each, nothing known of the noise
        (side(1.0), side(1.03), "lower", 0.002, "regressed"),  # a history that hardly moves
        (side(1.0), side(1.07), "lower", None, "too few runs"),
        (side(1.0), side(1.5), "lower", None, "regressed"),
        (side(1.0), side(1.5), "lower", 0.2, "inconclusive"),
        (side(1.0, width=2.0), side(1.5, width=2.0), "lower", None, "too few runs"),  # wide intervals within each run
        (side(0.0), side(0.0), "lower", None, "unchanged"),
        (side(0.0), side(1.0), "lower", None, "inconclusive"),
    ],
)
def test_a_verdict_needs_magnitude_and_separation(
    a: dict[str, Any], b: dict[str, Any], better: str, noise: float | None, verdict: str
) -> None:
    found = verdict_of(a, b, better, noise)
    assert found["verdict"] == verdict
    assert found["ratio"] is None or math.isfinite(found["ratio"])


def test_the_command(world: Any, in_world: Callable[[], None]) -> None:
    world.nights(8)
    world.nights(1, "slow | *er*", optimized=1.3e-3)
    in_world()
    app = typer.Typer(pretty_exceptions_enable=False)
    cli_history.register(app)
    base = ["compare", world.commits[7], "main", "--store", str(world.store)]
    done = CliRunner().invoke(app, [*base, "--json"])
    said = json.loads(done.stdout)
    assert said["a"]["is"].startswith("commit")
    assert said["geometric_mean"]["latency"]["n"] == 2
    assert {r["verdict"] for r in said["series"]} == {"regressed", "unchanged"}
    assert "series on both sides" in CliRunner().invoke(app, base).stdout
    assert "| regressed |" in CliRunner().invoke(app, [*base, "--markdown", "--metric", "latency"]).stdout
    with pytest.raises(UsageError):
        CliRunner().invoke(app, ["compare", "a", "b", "--store", str(world.store)], catch_exceptions=False)
