"""Judging apart: a process of its own keeps the verdicts, the pages show them, and it ends with the dashboard."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dashboard import source
from dashboard.judging import ROOT, Helper, main
from dashboard.source import Source
from harness.regress.verdicts import judge_within

Stores = dict[str, Path]


@pytest.fixture
def opened(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    """A source of which nothing is judged yet."""
    monkeypatch.setenv("PAIRBENCH_CACHE", str(tmp_path / "cache"))
    found = Source(str(stores["whole"]))
    found.refresh()
    yield found
    found.close()


def wait_until_whole(found: Source) -> None:
    until = time.monotonic() + 60
    while not found.judge().whole:
        assert time.monotonic() < until, found.judged
        time.sleep(0.1)


def test_much_to_judge_is_judged_apart_with_the_same_verdicts(opened: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float | None] = []

    def watched(budget_s: float | None, *rest: Any) -> Any:
        budgets.append(budget_s)
        return judge_within(budget_s, *rest)

    monkeypatch.setattr(source, "judge_within", watched)
    monkeypatch.setattr(source, "APART", 1)
    wait_until_whole(opened)
    apart = [(v.key.text, v.verdict) for v in opened.judged.verdicts]
    assert "regressed" in {verdict for _, verdict in apart}
    assert budgets[0] == 0.0
    assert opened.history is not None
    here, waiting = judge_within(0.0, opened.history)
    assert waiting == 0, "the process left something to be judged here"
    assert [(v.key.text, v.verdict) for v in here] == apart


def test_what_a_helper_leaves_is_judged_here(opened: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Helper):
        def __init__(self, store: str | None, branch: str) -> None:
            super().__init__("/nowhere", branch)

    monkeypatch.setattr(source, "Helper", Broken)
    monkeypatch.setattr(source, "APART", 1)
    wait_until_whole(opened)
    assert any(v.verdict == "regressed" for v in opened.judged.verdicts)


def test_a_history_that_cannot_be_judged_ends_the_helper_with_1(tmp_path: Path) -> None:
    """While its parent lives on: with the thread in Python's own reading of standard input this was an abort."""
    command = [sys.executable, "-m", "dashboard.judging", "HEAD", str(tmp_path / "nowhere")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as helper:
        assert helper.wait(60) == 1


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at the parent's children in /proc")
def test_the_helper_ends_when_the_dashboard_is_killed(stores: Stores, tmp_path: Path) -> None:
    code = (
        "import sys, time, dashboard.judging as j\n"
        "h = j.Helper(sys.argv[1], 'HEAD'); h._process.send_signal(19); print(h.pid, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PAIRBENCH_CACHE": str(tmp_path / "cache")}
    parent = subprocess.Popen([sys.executable, "-c", code, str(stores["whole"])], cwd=ROOT, env=env,
                              stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    os.kill(pid, 18)
    until = time.monotonic() + 30
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < until, "the helper lives on"
        time.sleep(0.1)


def test_it_judges_and_keeps(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import dashboard.judging as judging

    monkeypatch.setenv("PAIRBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(judging, "_give_way", lambda: None)
    monkeypatch.setattr(judging, "_end_with_parent", lambda: None)
    assert main("HEAD", str(stores["one"])) == 0
    assert list((tmp_path / "cache" / "verdicts").glob("*.json"))


def test_the_server_is_warm_before_the_first_browser_comes(
    maker: Any, draw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dashboard import queries, serve

    for at in range(2):
        maker.run(at, "h200")
    serve._warm(str(maker.root), "HEAD")
    asked: list[str] = []
    for name in ("coverage", "last_runs", "all_runs", "selections", "compared", "newest_ceilings"):
        monkeypatch.setattr(queries, name, lambda *_, name=name, **__: asked.append(name))
    for page in ("overview", "technique", "compare", "runs"):
        assert not draw(page, maker.root).exception
    assert asked == []
