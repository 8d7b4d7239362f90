"""``pairbench list``, ``show``, ``machine`` and ``doctor``: what there is, what was measured, and what is amiss."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from harness.commands import options
from harness.errors import DamagedStore, UsageError, unknown

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("list")(list_)
    app.command()(show)
    app.command()(machine)
    app.command()(doctor)


def list_(json: Json = False) -> None:
    """Techniques: layer, what they relieve, variants, workloads, and what they need."""
    from harness.discover import techniques

    rows = [t.as_json() for t in techniques().values()]
    if json:
        options.print_json(rows)
    else:
        from harness.tables import console

        console().print(_list_table(rows))
    broken = [r for r in rows if r["problem"]]
    for row in broken:
        print(f"pairbench: {row['module']}: {row['problem']}", file=sys.stderr)
    raise typer.Exit(1 if broken else 0)


def _list_table(rows: Sequence[Mapping[str, Any]]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("technique", "family", "kind", "layer", "relieves", "variants", "workloads", "what it is"):
        table.add_column(column)
    for row in rows:
        tiers: dict[str, int] = {}
        for workload in row["workloads"]:
            tiers[workload["tier"]] = tiers.get(workload["tier"], 0) + 1
        variants = [v["name"] + (f" ({', '.join(v['requires'])})" if v["requires"] else "") for v in row["variants"]]
        cells = [row["name"], row["family"], row["kind"], row["layer"], row["relieves"], "\n".join(variants)]
        table.add_row(*cells, " ".join(f"{t}:{n}" for t, n in tiers.items()), row["problem"] or row["summary"])
    return table


def show(
    run: Annotated[
        str | None, typer.Argument(help="A run id, or its beginning; the newest when none is given.")
    ] = None,
    technique: Annotated[str | None, typer.Option(help="Only this technique.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Folder or URL to read; your own history and the checkout's.")
    ] = None,
    json: Json = False,
) -> None:
    """What a run measured, with the prediction beside the measurement. Damage in the store is named, and exits 1."""
    from harness.history.store import describe, read_all, stores_to_read

    reading = read_all(stores_to_read(store))
    records = list(reading)
    if not records and reading.damage:
        raise DamagedStore(describe(reading.damage, nothing_left=True))
    try:
        chosen = _choose_run(records, run)
        found = _choose_technique(records, chosen, technique)
    except UsageError as err:
        if not reading.damage:
            raise
        raise UsageError(f"{err}\n{describe(reading.damage)}") from None  # it may be in what could not be read
    if json:
        options.print_json(found)
    else:
        _print_run(records, chosen, found)
    if reading.damage:
        raise DamagedStore(describe(reading.damage))


def _choose_run(records: Sequence[Mapping[str, Any]], run: str | None) -> str:
    runs = sorted({str(r["run"]) for r in records})
    if not runs:
        raise UsageError("the history is empty: 'pairbench run' makes a first record, or name another --store")
    if run is None:
        return runs[-1]
    matching = [r for r in runs if r.startswith(run)]
    if len(matching) != 1:
        if matching:
            raise UsageError(f"run {run!r} is ambiguous: {', '.join(matching[:10])}")
        raise unknown("run", run, runs)
    return matching[0]


def _choose_technique(records: Sequence[Mapping[str, Any]], run: str, technique: str | None) -> list[Mapping[str, Any]]:
    found = [r for r in records if r["run"] == run and r["type"] == "measurement"]
    if technique is None:
        return found
    known = {r["technique"] for r in found}
    if technique not in known:
        raise unknown(f"technique in run {run}", technique, known)
    return [r for r in found if r["technique"] == technique]


def _print_run(records: Sequence[Mapping[str, Any]], run: str, found: Sequence[Mapping[str, Any]]) -> None:
    from harness.spent import describe
    from harness.tables import console, long_reasons, print_served, result_table, seconds

    out = console()
    first = next(r for r in records if r["run"] == run)
    commit = (first["commit"] or "no commit")[:12] + (" dirty" if first["dirty"] else "")
    out.print(f"run {run} on {first['gpu']} ({first['machine']}), {commit}, {first['time']}", markup=False)
    argv = (first.get("asked") or {}).get("argv") or []
    if argv:
        # Under asv the suite of a technique asks, as `asv TECHNIQUE`.
        program = "" if argv[0] == "asv" else "pairbench "
        out.print(f"asked: {program}{shlex.join(map(str, argv))}", markup=False)
    for record in records:
        if record["run"] == run and record["type"] == "sentinel" and record.get("moved"):
            out.print(f"warning: the machine moved during this run: {record['reason']}", markup=False, style="yellow")
    out.print(result_table(found))
    for reason in long_reasons(found):
        out.print(reason, markup=False, soft_wrap=True)
    print_served(out, found)
    parts = next((r["spent"] for r in records if r["run"] == run and r.get("spent")), None)
    if parts is not None:
        named = ((name.removesuffix("_s"), value) for name, value in parts.items() if name.endswith("_s"))
        each = ", ".join(f"{name} {seconds(value) if value else '0 s'}" for name, value in named)
        out.print(f"spent: {describe(parts)} ({each})", markup=False)
    rows = [r for r in found if r.get("predicted") and "speedup" in r["metrics"]]
    for r in rows:
        said, got = r["predicted"]["speedup"], r["metrics"]["speedup"]["value"]
        name = f"{r['technique']} {r['workload']} {r['variant']}"
        out.print(f"{name}: predicted {said:.2f}×, measured {got:.2f}× ({got / said:.0%} of it)", markup=False)


def machine(
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Measure again though ceilings are known.")
    ] = False,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """This machine's ceilings: copy, read, matrix products by dtype, launch cost, links.

    The curve of the link between ranks is measured by `pairbench run collectives`, and shown here once it is.
    """
    from harness.ceilings import machine_key
    from harness.link_store import LinkKey, load_curves
    from harness.machine import ceilings_of
    from harness.machine_store import require_room
    from harness.provenance import provenance

    chosen = options.device(device)
    where = provenance(chosen)
    require_room(machine_key(where), always=recalibrate)
    found = ceilings_of(chosen, where, recalibrate=recalibrate)
    curves, problems = load_curves(LinkKey(machine_key(where)))
    kept = [curves[which] for which in sorted(curves)]
    if json:
        links = [asdict(k) for k in kept]
        options.print_json({"gpu": where["gpu"], "host": where["host"], "ceilings": found.as_dict(), "links": links})
        return
    from harness.tables import amount, console, seconds, size

    out = console()
    out.print(f"{where['gpu']} on {where['machine']}, measured {found.time}", markup=False)
    for name, value in (("copy, read and written", found.copy), ("read alone", found.read)):
        out.print(f"  {name:28s} {amount(value, 'B/s') if value else 'not measured'}", markup=False)
    for dtype, rate in sorted(found.matmul.items()):
        out.print(f"  {'product ' + dtype:28s} {amount(rate, 'FLOP/s')}", markup=False)
    for name, value in (("launch, eager", found.launch_eager), ("launch, in a graph", found.launch_graph)):
        out.print(f"  {name:28s} {seconds(value) if value else 'not measured'}", markup=False)
    host_link = (("host to device", found.host_to_device), ("device to host", found.device_to_host))
    for name, value in (*host_link, ("to another GPU, one way", found.link)):
        out.print(f"  {name:28s} {amount(value, 'B/s') if value else 'not measured'}", markup=False)
    for name, why in found.refused.items():
        out.print(f"  refused: {name}: {why}", markup=False)
    for k in kept:
        out.print(f"link, {k.curve.collective} on {k.curve.ranks} ranks, measured {k.time} (run {k.run})", markup=False)
        for payload, took, bus in k.curve.rates():
            out.print(f"  {size(payload):>10s} {seconds(took):>10s} {amount(bus, 'B/s'):>12s} on the bus", markup=False)
    for problem in problems:
        out.print(f"warning: {problem}", markup=False, style="yellow")


def doctor(json: Json = False) -> None:
    """What is missing, clashing or misconfigured here, each with the command that mends it."""
    from harness.doctor import diagnose

    findings = diagnose()
    if json:
        options.print_json([vars(f) for f in findings])
    else:
        from harness.tables import console

        out = console()
        style = {"ok": "green", "warn": "yellow", "fail": "bold red"}
        for f in findings:
            out.print(f"{f.status:5s}", style=style[f.status], end=" ")
            out.print(f"{f.name}: {f.message}" + (f"\n        mend: {f.mend}" if f.mend else ""), markup=False)
    raise typer.Exit(1 if any(f.status == "fail" for f in findings) else 0)
