"""Real text that every CPython carries: the documentation behind `help()`, about 465,000 characters of English.

It differs between Python versions, so a result names the digest of what it used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics

CALIBRATION_EVERY = 4


@dataclass(frozen=True)
class Text:
    """A text and the 16 hex digits that name it."""

    text: str
    digest: str


def real_text() -> Text:
    """The whole text: all topics in alphabetical order."""
    return _text("\n\n".join(topics[name] for name in sorted(topics)))


def judging_text() -> Text:
    """Text to judge a model on: three topics of every four."""
    return _text("\n\n".join(topics[name] for name in _judging_names()))


def calibration_text() -> Text:
    """Text to calibrate a quantizer on: the other topics, without the paragraphs that judging topics repeat.

    Topics quote one another (`compound` holds the whole of `for`), so apart by topic is not yet apart.
    """
    judged = {paragraph for name in _judging_names() for paragraph in _paragraphs(topics[name])}
    names = sorted(topics)[::CALIBRATION_EVERY]
    kept = [paragraph for name in names for paragraph in _paragraphs(topics[name]) if paragraph not in judged]
    return _text("\n\n".join(kept))


def _judging_names() -> list[str]:
    return [name for index, name in enumerate(sorted(topics)) if index % CALIBRATION_EVERY]


def _paragraphs(text: str) -> list[str]:
    return [paragraph.strip() for paragraph in text.split("\n\n") if paragraph.strip()]


def _text(text: str) -> Text:
    return Text(text, hashlib.sha256(text.encode()).hexdigest()[:16])
