"""``pairbench regressions``, ``pairbench compare`` and ``pairbench bisect``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.errors import DamagedStore, UsageError, unknown
from harness.history.cli import ReadStore, print_json

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print as Markdown, fit for a pull request.")]
Branch = Annotated[str, typer.Option(help="The branch whose line of commits is looked at.")]
FAIL_ON = ("regressed", "inconclusive")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(regressions)
    app.command()(compare)
    app.command()(bisect)


def open_for(store: str | None, branch: str) -> Any:
    """The history that a command looks at, ordered by the repository at hand.

    Raises:
        DamagedStore: there is damage and not one record beside it.
    """
    from harness.history.engine import open_history
    from harness.history.order import find_order_repository
    from harness.history.store import describe, stores_to_read

    stores = stores_to_read(store)

    def progress(done: int, total: int) -> None:
        if total > 50 << 20 and sys.stderr.isatty():
            end = "\n" if done >= total else ""
            print(f"\rindexing the history: {done / max(total, 1):.0%}", end=end, file=sys.stderr, flush=True)

    history = open_history(stores, find_order_repository(), branch, progress)
    if history.damage and not history.rows("SELECT 1 FROM records LIMIT 1"):
        raise DamagedStore(describe(history.damage, nothing_left=True))
    if history.order.reason is not None and history.order.places:
        print(f"pairbench: note: {history.order.reason}", file=sys.stderr)
    off = {word: sum(p.standing == word for p in history.order.places.values()) for word in ("orphan", "elsewhere")}
    if any(off.values()):
        said = f"{off['orphan']} on no branch (rebased away?), {off['elsewhere']} on other branches only"
        print(f"pairbench: note: recorded commits that are kept and not judged: {said}", file=sys.stderr)
    return history


def end_on_damage(history: Any) -> None:
    """Raises DamagedStore when part of the store could not be read."""
    from harness.history.store import describe

    if history.damage:
        raise DamagedStore(describe(history.damage))


@contextlib.contextmanager
def looked_up(history: Any) -> Iterator[None]:
    """What is not found within may stand in a part of the store that could not be read: the error names that too."""
    from harness.history.store import describe

    try:
        yield
    except UsageError as err:
        if not history.damage:
            raise
        raise UsageError(f"{err}\n{describe(history.damage)}") from None


def regressions(
    branch: Branch = "HEAD",
    since: Annotated[
        str | None, typer.Option(help="Leave changes out that are older than this commit, tag or date.")
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="Hold the end of each series against this commit or tag, not its own beginning.")
    ] = None,
    technique: Annotated[str | None, typer.Option(help="Only this technique.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only this GPU type.")] = None,
    variant: Annotated[str | None, typer.Option(help="Only this variant.")] = None,
    metric: Annotated[str | None, typer.Option(help="Only this metric.")] = None,
    store: ReadStore = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help="Exit 1 when a series is so and not acknowledged: regressed or inconclusive."),
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Measure the pairs in doubt again, and judge again.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="Show unchanged series too.")] = False,
    acknowledged: Annotated[Path | None, typer.Option(help="The file of accepted changes.")] = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """What got slower or larger, since when, whose doing it was, and how to see it again.

    Exits 0, or 1 by --fail-on or when part of the store is damaged.
    """
    from harness.history.query import latest
    from harness.regress import present
    from harness.regress.acknowledge import find_acknowledged, read_acknowledged
    from harness.regress.compare import select
    from harness.regress.confirm import confirm as run_again
    from harness.regress.verdicts import Scope, counts, judge

    for word in fail_on or []:
        if word not in FAIL_ON:
            raise unknown("verdict to fail on", word, FAIL_ON)
    history = open_for(store, branch)
    with looked_up(history):
        _check_filters(history, technique=technique, gpu=gpu, variant=variant, metric=metric)
        pinned = select(history, reference).filters.get("commit") if reference is not None else None
    if reference is not None and pinned is None:
        raise UsageError(f"--reference {reference}: give a commit, branch or tag")
    if acknowledged is not None and not acknowledged.is_file():
        raise UsageError(f"--acknowledged {acknowledged}: no such file")
    scope = Scope(technique, gpu, variant, metric, _since(history, since), pinned)
    accepted = read_acknowledged(acknowledged) if acknowledged else find_acknowledged(history.order.repository)
    verdicts = judge(history, scope, accepted)
    if confirm:
        notes = run_again(history, verdicts, store)
        for note in notes:
            print(f"pairbench: {note}", file=sys.stderr)
        history.refresh()
        verdicts = judge(history, scope, accepted)
    if json:
        print_json([verdict.as_json() for verdict in verdicts])
    elif markdown:
        typer.echo(present.markdown(verdicts, all_))
    else:
        present.print_table(verdicts, all_, len(latest(history, technique=technique, gpu=gpu, variant=variant)))
    found = counts(verdicts)
    end_on_damage(history)
    standing = [v.key.text for v in verdicts if v.still_regressed and v.verdict != "regressed"]
    if standing and "regressed" in (fail_on or []):
        print(f"pairbench: still worse than before an unaccepted regression: {', '.join(standing)}", file=sys.stderr)
        raise typer.Exit(1)
    if any(found[word] for word in fail_on or []):
        raise typer.Exit(1)


def _check_filters(history: Any, **filters: str | None) -> None:
    from harness.history.query import facets
    from harness.metric_names import METRICS

    known = {**facets(history), "metric": list(METRICS)}
    for name, value in filters.items():
        if value is not None and value not in known[name]:
            raise unknown({"gpu": "GPU type in the history"}.get(name, f"{name} in the history"), value, known[name])


def _since(history: Any, text: str | None) -> str | None:
    """A recorded commit, or an ISO date."""
    from harness.history.moments import utc
    from harness.history.order import resolve_selection

    if text is None:
        return None
    moment = utc(text)
    if moment is None:
        commit = resolve_selection(text, history.repository, history.order.places)
        if commit in history.order.places:
            return commit
        line = list(history.order.line)
        if commit in line:  # nothing was recorded there: the next commit that was
            later = [c for c in line[line.index(commit) :] if c in history.order.places]
            return later[0] if later else "9999"
        raise UsageError(f"--since {text}: commit {commit[:12]} is not on {history.branch}")
    return moment


def compare(
    a: Annotated[str, typer.Argument(help="A commit, branch, tag, run id, or gpu:NAME, torch:VERSION and the like.")],
    b: Annotated[str, typer.Argument(help="What it is compared with; ratios are B over A.")],
    technique: Annotated[str | None, typer.Option(help="Only this technique.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Only this GPU type.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Only this metric; may be given several times.")] = None,
    branch: Branch = "HEAD",
    store: ReadStore = None,
    json: Json = False,
    markdown: Markdown = False,
) -> None:
    """Two commits, branches, tags, runs, GPU types or stack versions, series by series; what one side lacks apart."""
    from harness.regress import present
    from harness.regress.compare import compare as compare_

    history = open_for(store, branch)
    with looked_up(history):
        _check_filters(history, technique=technique, gpu=gpu)
        done = compare_(history, a, b, metric, technique=technique, gpu=gpu)
    if json:
        print_json(done.as_json())
    elif markdown:
        typer.echo(present.comparison_markdown(done))
    else:
        present.print_comparison(done)
    end_on_damage(history)


def bisect(
    series: Annotated[str, typer.Argument(help="A series as 'regressions --json' names it, or its beginning.")],
    good: Annotated[str | None, typer.Option(help="A commit at the old level.")] = None,
    bad: Annotated[str | None, typer.Option(help="A commit at the new level.")] = None,
    commit: Annotated[
        str | None, typer.Option(help="The change that begins at this commit, if there are several.")
    ] = None,
    runs: Annotated[int, typer.Option(help="Runs at each commit; their median counts.", min=1)] = 1,
    branch: Branch = "HEAD",
    store: ReadStore = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the commands and run nothing.")] = False,
    json: Json = False,
) -> None:
    """Find the commit that moved a series: git bisect run, in a worktree of its own, measuring at each step."""
    from harness.regress.bisect import bisect as bisect_
    from harness.regress.bisect import plan, shown

    history = open_for(store, branch)
    with looked_up(history):
        task = plan(history, series, good, bad, runs, commit)
    if dry_run:
        if json:
            print_json({"series": task.key.text, "good": task.good, "bad": task.bad, "old": task.old, "new": task.new,
                        "commands": shown(task)})  # fmt: skip
        else:
            typer.echo("\n".join(shown(task)))
        end_on_damage(history)
        return
    assert history.repository is not None
    found = bisect_(history.repository, task, lambda line: print(line, file=sys.stderr))
    if json:
        print_json({"series": task.key.text, "commit": found.commit, "subject": found.subject, "steps": found.steps})
    else:
        typer.echo(f"{found.commit} {found.subject}")
    end_on_damage(history)
