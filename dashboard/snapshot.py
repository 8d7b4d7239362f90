"""The history as one page that opens from disk, and as a summary for a pull request: no Python, scripts or network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dashboard import glossary, queries
from dashboard.seriesview import lines_of
from dashboard.source import Judged, Source
from dashboard.svg import chart
from dashboard.text import ago, cut, esc, short
from dashboard.theme import LOOKS, VERDICTS, look, on_colour, signed, speed_colour, verdict_signed
from harness.errors import UsageError
from harness.history.query import SeriesKey
from harness.regress.present import MARKDOWN_ROWS, change, escape, markdown, markdown_table, what_changed
from harness.regress.verdicts import Verdict, counts

QUIET: Final = ("unchanged", "too few runs")
#: Series drawn, verdicts listed, and rows of a pull request's table at most; what is left out is counted.
MOST_SERIES: Final = 120
MOST_VERDICTS: Final = 300

STYLE: Final = """
:root{color-scheme:light dark;--line:#8885;--soft:#8882}
body{font:15px/1.45 system-ui,sans-serif;margin:0 auto;max-width:1280px;padding:1rem}
h1{font-size:1.6rem;margin:.2rem 0}h2{font-size:1.2rem;margin:1.6rem 0 .4rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.86rem}
th,td{padding:.25rem .5rem;border:1px solid var(--line);text-align:left;vertical-align:top}
td.cell{text-align:center;min-width:5.5rem}td.cell small{display:block}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(290px,1fr));gap:.8rem}
figure{margin:0;padding:.5rem;border:1px solid var(--line);border-radius:6px}
figcaption{font-size:.85rem;font-weight:600;overflow-wrap:anywhere}.key{font-size:.78rem;margin:.2rem 0 0}
svg{width:100%;height:auto;background:var(--soft)}.event{stroke:#fff;stroke-width:.8}
code{font-size:.82rem;overflow-wrap:anywhere}.none{opacity:.7}nav a{margin-right:1rem}
"""
#: Even a fault in the escaping could run nothing and load nothing.
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass
class Snapshot:
    """What a snapshot is made from."""

    source: Source
    rows: list[dict[str, Any]]
    judged: Judged
    made: str


def take(source: Source) -> Snapshot:
    """Everything that a snapshot needs; waits until every series is judged.

    Raises:
        UsageError: the history cannot be read, with the reason.
    """
    if source.history is None or not source.state:
        raise UsageError(source.problem or "the history cannot be read")
    rows = source.once("coverage", queries.coverage)
    return Snapshot(source, rows, source.judge_now(), queries.now().strftime("%Y-%m-%d %H:%M UTC"))


def write(path: Path, text: str, force: bool = False) -> None:
    """Write a file that does not exist yet.

    Raises:
        UsageError: it exists and ``force`` is not given, or it cannot be written.
    """
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} exists: give --force to write over it, or name another file") from None
    except OSError as err:
        raise UsageError(f"{path} cannot be written: {err.strerror}") from err


def html_page(snapshot: Snapshot) -> str:
    """One self-contained page with overview, regressions and series."""
    history = snapshot.source.history
    assert history is not None
    damage = (
        f"<p>⚠ {len(history.damage)} part(s) of the store could not be read and are left out; "
        f"<code>{esc(_verify(snapshot))}</code> lists them.</p>"
        if history.damage
        else ""
    )
    if not snapshot.rows and history.damage:
        body = "<p>No measurement in it could be read, so that there is nothing to show.</p>"
    elif not snapshot.rows:
        body = (
            "<p>The history is empty. <code>pairbench run</code> makes a first record; "
            "<code>pairbench report --store FOLDER</code> reads another store.</p>"
        )
    else:
        body = "".join([_coverage(snapshot.rows), _verdicts(snapshot.judged), _series(snapshot), _gpus(snapshot)])
    head = (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>pairbench</title>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<meta name='viewport' content='width=device-width,initial-scale=1'><style>{STYLE}</style></head><body>"
        f"<h1>pairbench</h1><p>Taken {esc(snapshot.made)} from {esc(', '.join(snapshot.source.names()))}</p>"
    )
    if snapshot.rows:
        head += (
            "<nav><a href='#coverage'>Overview</a><a href='#verdicts'>Regressions</a><a href='#series'>Series</a>"
            "<a href='#words'>Words</a></nav>"
        )
    return head + damage + body + _words() + "</body></html>\n"


def _verify(snapshot: Snapshot) -> str:
    """The command that lists what could not be read; a page and a summary go to others, and tell of no path."""
    return snapshot.source.over("pairbench history verify")[0].replace("`", "")


def _coverage(rows: Sequence[Mapping[str, Any]]) -> str:
    gpus = sorted({row["gpu"] for row in rows})
    cells = {(row["technique"], row["gpu"]): row for row in rows}
    names = list(dict.fromkeys(row["technique"] for row in rows))
    head = "".join(f"<th scope='col'>{esc(gpu)}</th>" for gpu in gpus)
    lines = "".join(
        f"<tr><th scope='row'>{esc(name)}</th>{''.join(_cell(cells[name, gpu]) for gpu in gpus)}</tr>" for name in names
    )
    return (
        "<h2 id='coverage'>What pays where</h2><p>Speedup of the optimized variant over the baseline with its 95 % "
        "interval, and over the best that one line of torch gives.</p>"
        f"<div class='scroll'><table><tr><th scope='col'>technique</th>{head}</tr>{lines}</table></div>"
    )


def _cell(row: Mapping[str, Any]) -> str:
    shown, entry = look(row["status"]), row["speedup"]
    stale = f" {LOOKS['stale'].sign}" if row["stale"] else ""
    title = esc(cut(f"{row['status']} {row['reason'] or ''}, {short(row['commit']) if row['commit'] else 'never run'}"))
    if entry and shown not in (LOOKS["wrong"], LOOKS["failed"]):
        colour = speed_colour(entry["value"])
        peer = row["speedup_peer"]
        more = f"<small>one-liner {peer['value']:.2f}×</small>" if peer else ""
        sign = f" {shown.sign}" if shown is not LOOKS["passed"] else ""
        return (
            f"<td class='cell' title='{title}' style='background:{colour};color:{on_colour(colour)}'>"
            f"<b>{entry['value']:.2f}×</b>{sign}{stale}<small>{entry['low']:.2f}–{entry['high']:.2f}</small>{more}</td>"
        )
    return f"<td class='cell' title='{title}'>{shown.sign} {esc(row['status'])}{stale}</td>"


def _loud(judged: Judged) -> list[Verdict]:
    return [
        v
        for v in judged.verdicts
        if v.verdict not in QUIET or any(event["recovered"] for event in v.body.get("events") or [])
    ]


def _verdicts(judged: Judged) -> str:
    said = ", ".join(f"{VERDICTS[name].sign} {n} {name}" for name, n in counts(judged.verdicts).items() if n)
    title = f"<h2 id='verdicts'>Regressions</h2><p>{esc(said) or 'No series could be judged.'}</p>"
    if judged.problem:
        title += f"<p>⚠ {esc(judged.problem)}</p>"
    found = _loud(judged)
    if not found:
        return title + "<p class='none'>No change was found.</p>"
    columns = ("verdict", "technique", "workload", "variant", "metric", "GPU type", "change", "since", "side",
               "what else changed", "measure again")  # fmt: skip
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in _verdict(v))}</tr>" for v in found[:MOST_VERDICTS])
    left = f"<p>… and {len(found) - MOST_VERDICTS} more.</p>" if len(found) > MOST_VERDICTS else ""
    head = "".join(f"<th scope='col'>{name}</th>" for name in columns)
    return f"{title}<div class='scroll'><table><tr>{head}</tr>{lines}</table></div>{left}"


def _verdict(v: Verdict) -> list[str]:
    body, key = v.body, v.key
    suspect = body.get("suspect") or {}
    commit = body.get("commit") or suspect.get("commit")
    accepted = f"<br>accepted: {esc(v.acknowledged)}" if v.acknowledged is not None else ""
    return [
        esc(verdict_signed(v.verdict, v.acknowledged is not None)) + accepted,
        *(
            esc(value)
            for value in (key.technique, body.get("workload"), key.variant, key.metric, key.gpu, change(body))
        ),
        esc(f"{short(commit)} {cut(body.get('subject') or suspect.get('subject') or '')}" if commit else ""),
        esc(body.get("side") or ""),
        esc(what_changed(body.get("changed"))),
        f"<code>{esc(body.get('reproduce') or '')}</code>",
    ]


def _series(snapshot: Snapshot) -> str:
    """One chart for each technique on a GPU type, baseline and optimized, and for every series that changed."""
    history = snapshot.source.history
    assert history is not None
    loud = {v.key for v in _loud(snapshot.judged)}
    groups: dict[tuple[Any, ...], list[tuple[SeriesKey, Any]]] = {}
    for key, row in queries.keys_of(history, {}, "latency"):
        if key.variant in ("baseline", "optimized"):
            groups.setdefault((key.technique, key.gpu, key.workload_id, key.dtype, key.ranks), []).append((key, row))
    first: dict[tuple[str, str], tuple[Any, ...]] = {}
    for place in groups:
        first.setdefault((place[0], place[1]), place)
    wanted = [p for p, found in groups.items() if any(key in loud for key, _ in found)]
    wanted += [place for place in first.values() if place not in wanted]
    figures = []
    for place in wanted[:MOST_SERIES]:
        found = groups[place]
        lines = lines_of(history, snapshot.judged, found)
        title = f"{place[0]} on {place[1]}, {found[0][1]['workload']} {place[3]}"
        figures.append(f"<figure><figcaption>{esc(title)}</figcaption>{chart(lines)}</figure>")
    left = f"<p>{len(wanted) - MOST_SERIES} more are in the dashboard.</p>" if len(wanted) > MOST_SERIES else ""
    return (
        "<h2 id='series'>Series</h2><p>Latency over commits, oldest first. Hollow points are not judged; point at one "
        f"for its commit and the command that measures it again.</p><div class='grid'>{''.join(figures)}</div>{left}"
    )


def _gpus(snapshot: Snapshot) -> str:
    rows = snapshot.source.once("last runs", queries.last_runs)
    lines = "".join(
        f"<tr><td>{esc(row['gpu'])}</td><td>{esc(row['last'])} ({esc(ago(queries.age_s(row['last']) or 0.0))} ago)</td>"
        f"<td>{esc(row['nightly'] or 'none recorded')}</td><td>{row['runs']}</td><td>{row['records']}</td></tr>"
        for row in rows
    )
    return (
        "<h2 id='gpus'>When each GPU type last ran</h2><div class='scroll'><table><tr><th>GPU type</th>"
        f"<th>last run</th><th>last CI run</th><th>runs</th><th>records</th></tr>{lines}</table></div>"
    )


def _words() -> str:
    signs = "".join(
        f"<li>{m.sign} <b>{m.title}</b>: {esc(m.means)}</li>" for m in (*LOOKS.values(), *VERDICTS.values())
    )
    plain = {word: text.replace("`", "") for word, text in glossary.WORDS.items()}
    words = "".join(f"<li><b>{esc(word)}</b>: {esc(text)}</li>" for word, text in plain.items())
    return f"<h2 id='words'>Words</h2><details><summary>Signs and words</summary><ul>{signs}{words}</ul></details>"


def markdown_summary(snapshot: Snapshot) -> str:
    """A summary fit for a pull request: verdicts with their commands first, then what pays."""
    history = snapshot.source.history
    unread = history.damage if history is not None else []
    if not snapshot.rows and unread:
        return (
            f"**pairbench**: nothing could be read, {len(unread)} part(s) are damaged or newer: "
            f"`{_verify(snapshot)}` lists them.\n"
        )
    if not snapshot.rows:
        return "**pairbench**: the history is empty; `pairbench run` makes a first record.\n"
    parts = [markdown(snapshot.judged.verdicts)]
    if snapshot.judged.problem:
        parts.append(f"The history could not be judged: {escape(snapshot.judged.problem)}")
    rows = [row for row in snapshot.rows if row["status"] != "not run"]
    shown = sorted(rows, key=lambda row: -(row["speedup"] or {"value": 0.0})["value"])[:MARKDOWN_ROWS]
    cells = [
        (row["technique"], row["gpu"], _ratio(row["speedup"]), _ratio(row["speedup_peer"]), signed(row["status"]),
         "stale" if row["stale"] else "", short(row["commit"]))
        for row in shown
    ]  # fmt: skip
    columns = ("technique", "GPU type", "over baseline", "over best one-liner", "status", "", "commit")
    parts.append(markdown_table(columns, cells))
    if len(rows) > len(shown):
        parts.append(f"… and {len(rows) - len(shown)} more.")
    if unread:
        parts.append(f"{len(unread)} part(s) of the store could not be read: `{_verify(snapshot)}`.")
    return "\n\n".join(parts) + "\n"


def _ratio(entry: Mapping[str, Any] | None) -> str:
    return "–" if entry is None else f"{entry['value']:.2f}× [{entry['low']:.2f}, {entry['high']:.2f}]"
