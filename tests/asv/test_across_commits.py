"""asv itself, across the commits of a small repository with one commit that makes a technique ten times slower."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from harness.history.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LATENCY = "fusion.nap.Nap.track_latency"


@pytest.fixture(scope="module")
def run(made: Any) -> str:
    """What `asv run ALL` printed."""
    return str(made.asv("run", "ALL", "--show-stderr"))


def saved(made: Any, commit: str) -> dict[str, list[float | None]]:
    """Variant → its numbers at that commit, by the file that asv keeps, in the order of the metrics' names."""
    (path,) = (made.path / "results" / "asv").glob(f"*/{made.commits[commit][:8]}-pairbench-py*-smoke.json")
    text = json.loads(path.read_text())
    rows = {name: row[0] for name, row in text["results"].items()}
    return {name.rpartition(".")[2]: rows[name] for name in sorted(rows)}


def contents(made: Any) -> dict[str, bytes]:
    """Every file under results/, by name."""
    return {str(p): p.read_bytes() for p in sorted((made.path / "results").rglob("*")) if p.is_file()}


def test_run_measures_every_commit_and_what_one_lacks_is_not_available(made: Any, run: str) -> None:
    assert "failed" not in run
    latency = {commit: saved(made, commit)["track_latency"] for commit in made.commits}
    has = {commit: [value == value for value in values] for commit, values in latency.items()}  # NaN is asv's n/a
    assert has["old"] == [False, False, False]
    assert "n/a: this commit has no harness.asv_api" in run
    assert has["first"] == [True, True, False]
    assert has["extra"] == has["slow"] == [True, True, True]


def test_results_lie_under_the_machines_type_and_tier_and_hold_no_path_of_this_machine(made: Any, run: str) -> None:
    from harness.provenance import provenance

    folder = made.path / "results" / "asv" / str(provenance("cpu")["gpu"])
    assert json.loads((folder / "machine.json").read_text())["machine"] == folder.name
    for name, content in contents(made).items():
        for path in (str(made.path), str(made.home), sys.prefix):
            assert path.encode() not in content, f"{path} in {name}"


def test_compare_shows_the_slower_commit_and_calls_nothing_else_of_it_better(made: Any, run: str) -> None:
    table = made.asv("compare", made.commits["extra"], made.commits["slow"], "--factor", "2", "--split")
    worse = table.partition("got worse")[2]
    for metric in ("track_latency", "track_inverse_throughput", "track_inverse_speedup"):
        assert re.search(rf"{metric}\('short@\w+', 'optimized'\)", worse), table
        assert not re.search(rf"{metric}\('short@\w+', 'baseline'\)", worse), table
    back = made.asv("compare", made.commits["slow"], made.commits["extra"], "--factor", "2", "--split")
    better = back.partition("improved")[2].partition("stayed")[0]
    assert "track_inverse_speedup('short" in better


def test_the_history_shows_it_too_under_the_commits_that_asv_installed(made: Any, run: str) -> None:
    records = [r for r in Store(made.path / "results" / "history").read() if r["type"] == "measurement"]
    by_commit = {commit: [r for r in records if r["commit"] == sha] for commit, sha in made.commits.items()}
    assert not by_commit["old"]
    assert not any(r["dirty"] for r in records)
    medians = {
        commit: {r["variant"]: statistics.median(r["samples"]["values"]) for r in found}
        for commit, found in by_commit.items()
    }
    assert medians["slow"]["optimized"] > 4 * medians["extra"]["optimized"]
    assert medians["slow"]["baseline"] < 4 * medians["extra"]["baseline"]
    assert all(r["commit_date"] for r in records)


def test_our_own_comparison_names_it_too_unless_the_machine_was_busy(made: Any, run: str) -> None:
    base, head = made.commits["extra"], made.commits["slow"]
    words = ("compare", base, head, "--store", "results/history", "--metric", "latency", "--json")
    compared = {row["variant"]: row for row in json.loads(made.call("harness", *words))["series"]}
    records = [r for r in Store(made.path / "results" / "history").read() if r["type"] == "measurement"]
    for variant in ("baseline", "optimized"):
        states = {r["status"] for r in records if r["variant"] == variant and r["commit"] in (base, head)}
        if states == {"passed"}:
            assert (compared[variant]["ratio"] > 4) is (variant == "optimized")
            assert variant == "baseline" or compared[variant]["verdict"] == "regressed"
        else:  # what is no one's baseline is not compared
            assert "unsettled" in states
            assert variant not in compared


def test_a_quick_run_and_a_new_one_with_nothing_new_leave_the_results_alone(made: Any, run: str) -> None:
    before = contents(made)
    made.asv("run", "--quick", f"{made.commits['slow']}^!")
    assert contents(made) == before
    assert "No commit hashes selected" in made.asv("run", "NEW", fine=False)
    assert contents(made) == before


def test_continuous_fails_on_the_slower_commit(made: Any, run: str) -> None:
    base, head = made.commits["extra"], made.commits["slow"]
    said = made.asv("continuous", "--quick", "--factor", "2", base, head, fine=False)
    assert "PERFORMANCE DECREASED" in said
    assert re.search(r"\| \+ .*track_latency\('short@\w+', 'optimized'\)", said)


def test_find_finds_the_slower_commit(made: Any, run: str) -> None:
    span = f"{made.commits['old']}..{made.commits['slow']}"
    said = made.asv("find", "--skip-save", span, LATENCY, PAIRBENCH_ASV_MODE="quick")
    assert f"Greatest regression found: {made.commits['slow'][:8]}" in said


def test_publish_names_the_regression_and_preview_serves_the_page(made: Any, run: str) -> None:
    made.asv("publish")
    regressions = json.loads((made.path / ".asv" / "html" / "regressions.json").read_text())["regressions"]
    named = {entry[0] for entry in regressions}
    assert any(n.startswith(LATENCY) and "'optimized'" in n for n in named)
    assert not any("'baseline'" in n and "memory" not in n for n in named)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "asv", "preview", "--port", str(port)]
    server = subprocess.Popen(
        command,
        cwd=made.path,
        env=made.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell that starts the tests in the background has them ignore Ctrl-C, and they hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert b"airspeed velocity" in page(f"http://127.0.0.1:{port}/")
        assert LATENCY.encode() in page(f"http://127.0.0.1:{port}/index.json")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def page(url: str, seconds: float = 20.0) -> bytes:
    """A page of a server that may still be starting."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return bytes(answer.read())
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_an_existing_environment_stores_a_commit_only_when_the_tree_is_that_commit(made: Any, run: str) -> None:
    before = contents(made)
    place = {"PYTHONPATH": str(made.path)}
    technique = made.path / "impls" / "fusion" / "nap.py"
    clean = technique.read_text()
    technique.write_text(clean + "# not committed\n")
    refused = made.asv("run", "-E", "existing", "--set-commit-hash", "HEAD", fine=False, **place)
    assert "the tree differs from" in refused
    technique.write_text(clean)
    other = made.asv("run", "-E", "existing", "--set-commit-hash", "HEAD~1", fine=False, **place)
    assert "check that commit out there" in other
    assert contents(made) == before

    made.asv("run", "-E", "existing", "--set-commit-hash", "HEAD", **place)
    added = {name: content for name, content in contents(made).items() if name not in before}
    (stored,) = [n for n in added if "/asv/" in n]
    assert (
        Path(stored).name
        == f"{made.commits['slow'][:8]}-existing-py{sys.version_info[0]}.{sys.version_info[1]}-smoke.json"
    )
    assert not any(sys.prefix.encode() in content for content in added.values())
    (kept,) = [n for n in added if "/history/" in n]
    measured = [json.loads(line) for line in Path(kept).read_text().splitlines()]
    assert {(r["commit"], r["dirty"]) for r in measured} == {(made.commits["slow"], False)}
    assert all(added.values()), os.listdir(made.path)
