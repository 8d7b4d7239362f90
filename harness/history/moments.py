"""Moments as text: ISO 8601 in UTC, so that they sort as they happened."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def utc(text: Any) -> str | None:
    """A moment as ISO 8601 in UTC, so that moments sort as text; one without a zone is taken as UTC, which is what
    tools write who leave it out. None if it is no moment."""
    try:
        moment = datetime.fromisoformat(str(text))
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
