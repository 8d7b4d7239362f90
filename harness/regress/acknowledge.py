"""Changes that were accepted, with a reason: ``acknowledged.toml`` in the repository. They stay visible.

::

    [[acknowledged]]
    technique = "add_rms_norm"          # patterns with * and ? are allowed in all but commit and reason
    variant = "optimized"               # optional, as are workload, dtype, gpu and metric
    metric = "latency"
    commit = "4f2a9c1"                  # the commit from which on the new level holds, or one among the suspects
    reason = "masks the tail of odd widths; 4 % slower and right"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from harness.errors import UsageError, unknown

FILE: Final = "acknowledged.toml"
PATTERNS: Final = ("technique", "variant", "workload", "dtype", "gpu", "metric")


@dataclass(frozen=True)
class Acknowledged:
    """One accepted change: which series (patterns by name), from which commit, and why."""

    patterns: tuple[tuple[str, str], ...]
    commit: str
    reason: str

    def covers(self, series: Mapping[str, Any], commits: Sequence[str]) -> bool:
        """Whether it is this series' change; ``commits`` are those that may have caused it."""
        return all(fnmatchcase(str(series.get(name) or ""), pattern) for name, pattern in self.patterns) and any(
            commit.startswith(self.commit) for commit in commits
        )


def read_acknowledged(path: Path) -> list[Acknowledged]:
    """The entries of a file; none when there is no file.

    Raises:
        UsageError: it is no TOML, or an entry lacks technique, commit or reason or has a key that is unknown.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(f"{path} cannot be read: {err}") from err
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise UsageError(f"{path} is not TOML: {err}") from err
    entries = data.pop("acknowledged", [])
    if data or not isinstance(entries, list):
        raise UsageError(
            f"{path}: expected [[acknowledged]] entries and nothing else, found {sorted(data) or entries!r}"
        )
    return [_entry(raw, f"{path}: entry {number}") for number, raw in enumerate(entries, 1)]


def _entry(raw: Any, where: str) -> Acknowledged:
    if not isinstance(raw, Mapping):
        raise UsageError(f"{where} is not a table")
    known = (*PATTERNS, "commit", "reason")
    for key, value in raw.items():
        if key not in known:
            raise UsageError(f"{where}: {unknown('key', key, known)}")
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{where}: {key} must be a text that is not empty, got {value!r}")
    for key in ("technique", "commit", "reason"):
        if key not in raw:
            raise UsageError(f"{where} lacks {key!r}")
    if len(raw["commit"]) < 7:
        raise UsageError(f"{where}: commit {raw['commit']!r} is too short to name one: give at least seven digits")
    patterns = tuple((name, raw[name]) for name in PATTERNS if name in raw)
    return Acknowledged(patterns, raw["commit"].lower(), raw["reason"].strip())


def find_acknowledged(root: Path | None) -> list[Acknowledged]:
    """The entries of the file at a repository's root, else in the working directory.

    Raises:
        UsageError: as :func:`read_acknowledged`.
    """
    return read_acknowledged((root or Path.cwd()) / FILE)
