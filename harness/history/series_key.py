"""What makes records one series, as one word that fits a URL and a command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Self
from urllib.parse import unquote

from harness.errors import UsageError, unknown
from harness.metric_names import METRICS

KEY_COLUMNS: Final = ("technique", "variant", "workload_id", "dtype", "gpu", "ranks", "method", "clock", "cache")


@dataclass(frozen=True)
class SeriesKey:
    """What makes records one series (:func:`harness.record.series_key`) and the metric that is looked at."""

    technique: str
    variant: str
    workload_id: str
    dtype: str
    gpu: str
    ranks: int
    method: int
    clock: str | None
    cache: str | None
    metric: str = "latency"

    @property
    def text(self) -> str:
        """The series as one word, for a URL or a command line. Imported names hold anything: a slash within a part is
        ``%2F``, a percent sign ``%25``, and a part that is nothing but a dash ``%2D``, since a dash says there is none.
        """
        return "/".join("-" if value is None else _escaped(str(value)) for value in asdict(self).values())

    @classmethod
    def parse(cls, text: str) -> Self:
        """The series that a word names.

        Raises:
            UsageError: the word has not ten parts, or an unknown metric.
        """
        parts = text.split("/")
        names = [item.name for item in fields(cls)]
        if len(parts) != len(names) or not (parts[5].isdigit() and parts[6].isdigit()):
            raise UsageError(f"series {text!r} is not of the form {'/'.join(names)}")
        if parts[9] not in METRICS:
            raise unknown("metric", parts[9], METRICS)
        technique, variant, workload_id, dtype, gpu = (unquote(part) for part in parts[:5])
        clock, cache = (None if part == "-" else unquote(part) for part in parts[7:9])
        return cls(technique, variant, workload_id, dtype, gpu, int(parts[5]), int(parts[6]), clock, cache, parts[9])

    @classmethod
    def of(cls, row: Mapping[str, Any], metric: str) -> Self:
        """The series of a row and a metric."""
        return cls(**{name: row[name] for name in KEY_COLUMNS}, metric=metric)

    def where(self) -> tuple[str, list[Any]]:
        """A condition that holds for the records of the series, and its parameters."""
        values = [getattr(self, name) for name in KEY_COLUMNS]
        return " AND ".join(f'"{name}" IS NOT DISTINCT FROM ?' for name in KEY_COLUMNS), values


def _escaped(part: str) -> str:
    return "%2D" if part == "-" else part.replace("%", "%25").replace("/", "%2F")
