"""What a technique claims beside what was measured: each promise kept, broken, or not to be told. No Streamlit here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from harness.history.engine import Row, as_object

#: Claimed quantity → (metric, title, whether the metric's ratio is turned over to give it).
QUANTITIES: Final = {
    "latency": "m_latency",
    "throughput": "m_throughput",
    "memory": "m_peak_memory",
    "communication": "link_bytes",
}
#: Whether a ratio of nothing to something, or of something to nothing, is lower or higher.
NONE: Final = {"lower": "none, where the baseline takes some", "higher": "some, where the baseline takes none"}
#: A move of less than this is no move.
STILL: Final = 0.02


def claim_rows(rows: Sequence[Row], claim: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each quantity: what is claimed, the ratio optimized over baseline (geometric mean over workloads with
    its ends), and whether the promise is kept.

    Args:
        rows: newest records of a technique on a GPU type.
        claim: quantity → ``lower``, ``higher`` or ``same``; ``cost`` in words.
    """
    found = []
    shaky = any(r["variant"] in ("baseline", "optimized") and r["status"] == "unsettled" for r in rows)
    for name, column in QUANTITIES.items():
        ratio = _ratio(rows, column)
        claimed = claim.get(name, "")
        busy = shaky and bool(claimed) and ratio is None
        found.append(
            {
                "what": name,
                "claimed": claimed or "nothing",
                "measured": "unsettled: the machine was busy" if busy else _words(ratio),
                "kept": "◇ unsettled" if busy else _kept(claimed, ratio),
                **({"ratio": ratio["value"], "low": ratio["low"], "high": ratio["high"]} if ratio else
                   {"ratio": None, "low": None, "high": None}),
                "workloads": ratio["workloads"] if ratio else 0,
            }
        )  # fmt: skip
    return found


def _value(row: Row, column: str, part: str = "") -> float | None:
    if column == "link_bytes":
        counters = row["counters"] if isinstance(row["counters"], Mapping) else as_object(row["counters"])
        found = counters.get("link_bytes")
        return float(found) if isinstance(found, (int, float)) else None
    value: float | None = row.get(column + part)
    return value


def _ratio(rows: Sequence[Row], column: str) -> dict[str, Any] | None:
    """Optimized over baseline; for latency the ends come from the paired rounds' speedup where it is known.

    A figure may be zero, as the memory of an update in place: on both sides it is the same, on one side it has no ratio
    and is counted by its way (``from_none``).
    """
    bases = {_place(r): r for r in rows if r["variant"] == "baseline" and r["status"] == "passed"}
    logs: list[tuple[float, float, float]] = []
    ways: list[str] = []
    for row in rows:
        base = bases.get(_place(row))
        if row["variant"] != "optimized" or row["status"] != "passed" or base is None:
            continue
        if column == "m_latency" and row["m_speedup"]:
            ends = [row["m_speedup"], row["m_speedup_high"], row["m_speedup_low"]]
            value, low, high = (1 / (end or row["m_speedup"]) for end in ends)
        else:
            mine, theirs = _value(row, column), _value(base, column)
            if mine is None or theirs is None or min(mine, theirs) < 0:
                continue
            if mine == 0 or theirs == 0:
                if mine == theirs:
                    logs.append((0.0, 0.0, 0.0))
                else:
                    ways.append("lower" if mine == 0 else "higher")
                continue
            value = mine / theirs
            low = (_value(row, column, "_low") or mine) / (_value(base, column, "_high") or theirs)
            high = (_value(row, column, "_high") or mine) / (_value(base, column, "_low") or theirs)
        logs.append((math.log(value), math.log(low), math.log(high)))
    if not logs and not ways:
        return None
    count = {"workloads": len(logs) + len(ways), "from_none": ways}
    if not logs:
        return {"value": None, "low": None, "high": None, **count}
    value, low, high = (math.exp(sum(item[at] for item in logs) / len(logs)) for at in range(3))
    return {"value": value, "low": low, "high": high, **count}


def _place(row: Row) -> tuple[Any, ...]:
    return row["workload_id"], row["dtype"], row["ranks"]


def _words(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "not measured"
    ways, words = ratio["from_none"], []
    if ratio["value"] is not None:
        words.append(f"{ratio['value']:.3g} × the baseline's [{ratio['low']:.3g}, {ratio['high']:.3g}]")
    for way, said in NONE.items():
        if way in ways:
            alone = ways.count(way) == ratio["workloads"]
            words.append(said if alone else f"{said} ({ways.count(way)} of {ratio['workloads']})")
    return "; ".join(words)


def _moved(ratio: Mapping[str, Any]) -> str:
    """Which way everything moved: each workload without a ratio, and the mean of the others."""
    ways = set(ratio["from_none"])
    if ratio["value"] is not None and not 1 - STILL <= ratio["low"] <= ratio["high"] <= 1 + STILL:
        low, high = ratio["low"], ratio["high"]
        ways.add("lower" if high < 1 - STILL else "higher" if low > 1 + STILL else "no clear move")
    return ways.pop() if len(ways) == 1 else "no clear move"


def _kept(claimed: str, ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "– not measured" if claimed else "–"
    moved = _moved(ratio)
    if not claimed:
        return "–" if moved == "no clear move" else f"◇ {moved}, not claimed"
    if claimed == "same":
        near = not ratio["from_none"] and ratio["low"] >= 1 - 5 * STILL and ratio["high"] <= 1 + 5 * STILL
        return "● kept" if near else f"✖ not kept: {moved}"
    if moved == claimed:
        return "● kept"
    return f"✖ not kept: {moved}" if moved != "no clear move" else "◇ no clear move"
