"""Turns what a user asked for into what is measured: techniques, their workloads and variants. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.discover import Technique, find, techniques, workloads_of
from harness.errors import UsageError, unknown
from harness.serving.sweep import RATE, sweep
from harness.workload import TIERS, Workload, apply_settings, parse_workloads

#: What a tier measures: full is the nightly set and the large shapes.
TIER_HOLDS = {"smoke": ("smoke",), "quick": ("quick",), "full": ("quick", "full")}
#: Seconds of sampling for one technique, shared by its workloads.
BUDGET_S = {"smoke": 5.0, "quick": 30.0, "full": 120.0}


@dataclass(frozen=True)
class Request:
    """What a user asked ``pairbench run`` or ``pairbench check`` for; see the command line's help for each."""

    names: Sequence[str] = ()
    tier: str = "smoke"
    variants: Sequence[str] = ()
    workloads: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    workload_file: Path | None = None
    ranks: int | None = None
    model: str | None = None
    trace: str | None = None
    rates: Sequence[float] = ()


@dataclass(frozen=True)
class Item:
    """One technique to measure: its workloads of one number of ranks, and its variants."""

    technique: Technique
    workloads: tuple[Workload, ...]
    variants: tuple[str, ...]
    ranks: int


def make_plan(request: Request) -> list[Item]:
    """What to measure, in order.

    Raises:
        UsageError: an unknown technique, tier, variant, workload or setting (with the nearest names), or nothing left.
    """
    if request.tier not in TIERS:
        raise unknown("tier", request.tier, TIERS)
    chosen = [find(name) for name in request.names] if request.names else list(techniques().values())
    own = _workload_file(request.workload_file, chosen) if request.workload_file else None
    items: list[Item] = []
    left_over = set(request.workloads)
    unknown_settings = set(request.settings)
    for technique in chosen:
        if technique.problem is not None:
            raise UsageError(f"technique {technique.name!r} cannot be used: {technique.problem}")
        everything = own.get(technique.name, []) if own is not None else workloads_of(technique)
        workloads = _select(technique, everything, request, own is not None, left_over)
        workloads = _at_rates([_set(w, request, unknown_settings) for w in workloads], technique, request)
        variants = _variants(technique, request)
        distinct = {w.workload_id: w for w in workloads}
        for ranks in sorted({w.ranks for w in distinct.values()}):
            group = tuple(w for w in distinct.values() if w.ranks == ranks)
            items.append(Item(technique, group, variants, ranks))
    _refuse_leftovers(request, chosen, items, left_over, unknown_settings)
    if request.model is not None and request.names and not any("model" in w.dims for i in items for w in i.workloads):
        raise UsageError(f"--model {request.model}: nothing that was chosen reads a model")
    return items


def _select(
    technique: Technique, everything: Sequence[Workload], request: Request, own: bool, left_over: set[str]
) -> list[Workload]:
    if request.workloads:
        found = [w for w in everything if w.name in request.workloads]
        left_over.difference_update(w.name for w in found)
        if not found and request.names:
            raise unknown(f"workload of {technique.name}", request.workloads[0], [w.name for w in everything])
        return found
    if own:
        return list(everything)
    return [w for w in everything if w.tier in TIER_HOLDS[request.tier]]


def _set(workload: Workload, request: Request, unknown_settings: set[str]) -> Workload:
    settings = {k: v for k, v in request.settings.items() if k in workload.dims or k == "dtype"}
    unknown_settings.difference_update(settings)
    if request.ranks is not None:
        if "ranks" in workload.dims:
            settings["ranks"] = str(request.ranks)
        elif request.ranks != 1 and request.names:
            raise UsageError(f"{workload.technique} runs on one rank; --ranks {request.ranks} does not apply to it")
    for key, value in (("model", request.model), ("trace", request.trace)):
        if value is not None and key in workload.dims:
            settings[key] = Path(value).name  # a record says what was read, not where one machine keeps it
    return apply_settings(workload, settings)


def _at_rates(workloads: list[Workload], technique: Technique, request: Request) -> list[Workload]:
    """Each workload at each request rate that was asked for; those that send no requests are left out then."""
    if not request.rates:
        return workloads
    sending = [w for w in workloads if RATE in w.dims]
    if workloads and not sending and request.names:
        raise UsageError(f"--request-rate: {technique.name} sends no requests, so it has no rate")
    return [point for w in sending for point in sweep(w, request.rates)]


def _variants(technique: Technique, request: Request) -> tuple[str, ...]:
    known = [v.name for v in technique.variants]
    if not request.variants:
        return tuple(known)
    for name in request.variants:
        if name not in known and request.names:
            raise unknown(f"variant of {technique.name}", name, known)
    wanted = {"baseline", *request.variants}
    return tuple(n for n in known if n in wanted)


def _refuse_leftovers(
    request: Request, chosen: Sequence[Technique], items: Sequence[Item], left_over: set[str], settings: set[str]
) -> None:
    every = [w for t in chosen if t.problem is None for w in workloads_of(t)]
    if left_over:
        raise unknown("workload", sorted(left_over)[0], {w.name for w in every})
    if settings:
        raise unknown("dimension to --set", sorted(settings)[0], {k for w in every for k in w.dims} | {"dtype"})
    if not items:
        names = ", ".join(request.names) or "any technique"
        raise UsageError(f"nothing to measure: {names} has no workload of tier {request.tier}; try another --tier")


def _workload_file(path: Path, chosen: Sequence[Technique]) -> dict[str, list[Workload]]:
    """Workloads of a user's JSON file: a list of mappings, each with ``technique`` unless one technique is chosen."""
    try:
        raws = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise UsageError(f"--workload-file {path}: {err.strerror or err}") from err
    except ValueError as err:
        raise UsageError(f"--workload-file {path}: not JSON: {err}") from err
    if not isinstance(raws, list) or not all(isinstance(r, dict) for r in raws):
        raise UsageError(f"--workload-file {path}: expected a list of workloads, each an object")
    by_name: dict[str, list[dict[str, object]]] = {}
    for raw in raws:
        name = raw.pop("technique", chosen[0].name if len(chosen) == 1 else None)
        if name not in {t.name for t in chosen}:
            raise unknown("technique in the workload file", str(name), [t.name for t in chosen])
        by_name.setdefault(str(name), []).append({"tier": "quick", **raw})
    own = {name: parse_workloads(name, group, str(path)) for name, group in by_name.items()}
    for technique in chosen:
        _same_dimensions(technique, own.get(technique.name, []), path)
    return own


def _same_dimensions(technique: Technique, own: Sequence[Workload], path: Path) -> None:
    """A user's workload has the dimensions that the technique's own have: none misspelt, none of the shared ones left
    out (those that say how to measure may be).

    Raises:
        UsageError: one that no workload of the technique has (the nearest are named), or one that it lacks.
    """
    if not own:
        return
    listed = [set(w.dims) for w in workloads_of(technique)]
    known, shared = set[str]().union(*listed), set.intersection(*listed) - {"direction", "ranks"}
    for workload in own:
        for key in workload.dims:
            if key not in known | {"direction", "ranks"}:
                raise unknown(f"dimension of {technique.name} in {path}, workload {workload.name!r}:", key, known)
        lacking = sorted(shared - set(workload.dims))
        if lacking:
            raise UsageError(f"--workload-file {path}: workload {workload.name!r} lacks {', '.join(lacking)}")
