"""Questions of the dashboard's own, held against the history's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dashboard import queries
from dashboard.source import open_source
from harness.history import query

#: What only the history's own points carry.
OWN = {"ids", "runs"}


def again(path: Path, factor: float, run: str) -> None:
    """Another run of the same commit, with no interval and another driver."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        record |= {
            "run": run,
            "id": record["id"].replace(record["run"], run),
            "time": record["time"].replace("T00", "T07"),
        }
        record |= {"run": run, "stack": record["stack"] | {"driver": "590"}}
        for figure in (record.get("metrics") or {}).values():
            figure |= {"value": figure["value"] * factor}
            figure.pop("low", None), figure.pop("high", None)
        lines.append(json.dumps(record))
    path.with_name(f"{run}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_points_of_several_series_are_the_points_of_each(maker: Any) -> None:
    paths = [maker.run(at, "h200", dirty=at == 3, everything=False) for at in range(5)]
    maker.run(2, "l40s", everything=False)
    again(paths[1], 1.1, "20260302T070000Z-h2000009")
    history = open_source(str(maker.root)).history
    assert history is not None
    for metric in ("latency", "speedup"):
        keys = [key for key, _ in queries.keys_of(history, {"technique": "add_rms_norm"}, metric)]
        found = queries.points(history, keys)
        assert set(found) == set(keys)
        assert len(keys) == (4 if metric == "latency" else 2)
        for key in keys:
            whole = query.series(history, key)
            assert len(whole) > 0
            assert [len(point["values"]) for point in found[key]] == [len(point["values"]) for point in whole]
            for point, same in zip(found[key], whole, strict=True):
                assert {name: point[name] for name in same if name not in OWN} == {
                    name: value for name, value in same.items() if name not in OWN
                }
    assert queries.points(history, []) == {}
