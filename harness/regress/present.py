"""Verdicts and comparisons as tables for a terminal and as Markdown for a pull request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.metric_names import METRICS
from harness.regress.attribution import as_text
from harness.regress.compare import Compared
from harness.regress.verdicts import Verdict, counts

STYLE = {
    "regressed": "bold red",
    "improved": "green",
    "inconclusive": "yellow",
    "unchanged": "dim",
    "too few runs": "dim",
}
COLUMNS = (
    "verdict",
    "technique",
    "workload",
    "variant",
    "metric",
    "gpu",
    "change",
    "since",
    "side",
    "what else changed",
)
#: Rows that a pull request still wants to see.
MARKDOWN_ROWS = 50


def change(body: Mapping[str, Any], names: tuple[str, str, str] = ("ratio", "low", "high")) -> str:
    """A ratio as a change in percent with its interval: ``+5.2 % [+4.1, +6.3]``."""
    ratio, low, high = (body.get(name) for name in names)
    if ratio is None:
        return "–"
    text = f"{(ratio - 1) * 100:+.1f} %"
    return f"{text} [{(low - 1) * 100:+.1f}, {(high - 1) * 100:+.1f}]" if low is not None and high is not None else text


def what_changed(changed: Mapping[str, Any] | None) -> str:
    """The commits in question, and everything else that changed with them."""
    if not changed:
        return ""
    commits = changed["commits"]
    said = []
    if len(commits) + changed["more_commits"] > 1:
        said.append(f"{len(commits) + changed['more_commits']} commits")
    said.extend(f"{name} {as_text(old)} → {as_text(new)}" for name, (old, new) in changed["stack"].items())
    for name, title in (("machine", "machine"), ("power_limit_w", "power limit")):
        said.extend(f"{title} {as_text(old)} → {as_text(new)}" for old, new in filter(None, [changed[name]]))
    return "; ".join(said)


def shown(verdicts: Sequence[Verdict], everything: bool) -> list[Verdict]:
    """What is worth a row: all but what is unchanged or has too few runs; recovered regressions stay."""
    if everything:
        return list(verdicts)
    quiet = ("unchanged", "too few runs")
    return [v for v in verdicts if v.verdict not in quiet or any(e["recovered"] for e in v.body.get("events") or [])]


def _cells(verdict: Verdict) -> tuple[str, ...]:
    body, key = verdict.body, verdict.key
    said = verdict.verdict
    events = body.get("events") or []
    if verdict.acknowledged is not None:
        said += f" (acknowledged: {verdict.acknowledged})"
    elif verdict.verdict == "unchanged" and any(event["recovered"] for event in events):
        said += " (regressed, recovered)"
    since, subject = body.get("commit"), body.get("subject")
    suspect = body.get("suspect")
    if suspect and verdict.verdict == "inconclusive":
        since, subject = suspect["commit"], suspect["subject"]
    where = f"{(since or '')[:12]} {subject or ''}".strip()
    workload = str(body.get("workload"))
    return (
        said,
        key.technique,
        workload,
        key.variant,
        key.metric,
        key.gpu,
        change(body),
        where,
        body.get("side") or "",
        what_changed(body.get("changed")),
    )


def summary(verdicts: Sequence[Verdict]) -> str:
    """How many of each verdict, in words."""
    found = counts(verdicts)
    return f"{len(verdicts)} series: " + ", ".join(f"{n} {name}" for name, n in found.items() if n)


def print_table(verdicts: Sequence[Verdict], everything: bool = False, unjudged: int = 0) -> None:
    """The table, and under it how to see each regression again. Text of the store is printed as text.

    Args:
        unjudged: records in scope that no verdict looks at.
    """
    from rich.text import Text

    from harness.tables import console

    out = console()
    rows = shown(verdicts, everything)
    if not verdicts and unjudged:
        out.print(
            f"{unjudged} record(s), and none to judge: only what passed on a clean commit of the branch is judged"
        )
        return
    if not verdicts:
        out.print("the history has no series here: 'pairbench run' makes a first record, or name another --store")
        return
    if rows:
        table = _table(COLUMNS)
        for verdict in rows:
            cells = _cells(verdict)
            table.add_row(Text(cells[0], style=STYLE[verdict.verdict]), *(Text(cell) for cell in cells[1:]))
        out.print(table)
    for verdict in rows:
        if verdict.verdict in ("regressed", "inconclusive") and verdict.acknowledged is None:
            smallest = verdict.body.get("smallest_change")
            shows = f"; three runs show {smallest:.1%}" if smallest is not None else ""
            why = verdict.body.get("side_reason") or verdict.body["reason"]
            out.print(Text(f"{verdict.key.text}: {why}{shows}\n  {verdict.body['reproduce']}"))
    out.print(summary(verdicts), markup=False)


def _table(columns: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def escape(text: str) -> str:
    """Text of the store inside a Markdown table: never markup, never a new cell."""
    for sign in "\\`*_{}[]<>|#~!":
        text = text.replace(sign, f"\\{sign}")
    # A backslash stops neither: mentions are found after Markdown is rendered, formulas before.
    text = text.replace("@", "@\u200b").replace("$", "<span>$</span>")
    return " ".join(text.split())


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines.extend(f"| {' | '.join(escape(cell) for cell in row)} |" for row in rows[:MARKDOWN_ROWS])
    if len(rows) > MARKDOWN_ROWS:
        lines.append(f"\n… and {len(rows) - MARKDOWN_ROWS} more.")
    return "\n".join(lines)


def markdown(verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """The verdicts as Markdown, with the commands that reproduce the regressions."""
    rows = shown(verdicts, everything)
    parts = [f"**pairbench**: {summary(verdicts)}"]
    if rows:
        parts.append(markdown_table(COLUMNS, [_cells(verdict) for verdict in rows]))
    commands = sorted(
        {v.body["reproduce"] for v in rows if v.verdict in ("regressed", "inconclusive") and v.acknowledged is None}
    )
    if commands:
        parts.append("```\n" + "\n".join(command.replace("`", "'") for command in commands) + "\n```")
    return "\n\n".join(parts)


COMPARISON = ("verdict", "technique", "workload", "variant", "metric", "gpu", "A", "B", "B over A")


def with_unit(value: float, unit: str) -> str:
    """A value as it is shown; a ratio has no unit to show."""
    return f"{value:.4g}" if unit == "1" else f"{value:.4g} {unit}"


def _comparison_rows(done: Compared) -> list[tuple[str, ...]]:
    return [
        (row["verdict"], row["technique"], str(row["workload"]), row["variant"], row["metric"], row["gpu"],
         f"{with_unit(row['a']['value'], row['unit'])} (n={row['a']['n']})",
         f"{row['b']['value']:.4g} (n={row['b']['n']})",
         change(row, ("ratio", "ratio_low", "ratio_high")))
        for row in done.series
    ]  # fmt: skip


def _missing_rows(done: Compared) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for side, missing in (("only in A", done.only_a), ("only in B", done.only_b)):
        for row in missing:
            there = row["there"] + (f": {row['reason']}" if row["reason"] else "")
            rows.append(
                (side, row["technique"], str(row["workload"]), row["variant"], row["metric"], row["gpu"], there)
            )
    return rows


def means(done: Compared) -> list[str]:
    """The geometric means over the intersection, in words."""
    said = []
    for name, mean in done.means.items():
        better = "lower" if METRICS[name].better == "lower" else "higher"
        said.append(
            f"{name}: {change(mean)} in the geometric mean of {mean['n']} series on both sides ({better} is better)"
        )
    return said


MISSING = ("", "technique", "workload", "variant", "metric", "gpu", "on the other side")


def print_comparison(done: Compared) -> None:
    """The comparison as tables."""
    from rich.text import Text

    from harness.tables import console

    out = console()
    out.print(f"A: {done.a.describes}\nB: {done.b.describes}", markup=False)
    for columns, rows in ((COMPARISON, _comparison_rows(done)), (MISSING, _missing_rows(done))):
        if rows:
            table = _table(columns)
            for row in rows:
                table.add_row(Text(row[0], style=STYLE.get(row[0], "")), *(Text(cell) for cell in row[1:]))
            out.print(table)
    for line in means(done) or ["the two have no series in common"]:
        out.print(line, markup=False)


def comparison_markdown(done: Compared) -> str:
    """The comparison as Markdown."""
    parts = [f"A: {escape(done.a.describes)}  \nB: {escape(done.b.describes)}"]
    for columns, rows in ((COMPARISON, _comparison_rows(done)), (MISSING, _missing_rows(done))):
        if rows:
            parts.append(markdown_table(columns, rows))
    parts.append("  \n".join(means(done) or ["the two have no series in common"]))
    return "\n\n".join(parts)
