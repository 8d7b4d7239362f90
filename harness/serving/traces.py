"""Request traces: loaders for the public formats.

========  =============================================================================================================
azure     CSV: TIMESTAMP, ContextTokens, GeneratedTokens (Azure Public Dataset; Splitwise, ISCA 2024)
mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids, one id per 512-token block of the prompt;
          equal ids are equal prefixes (Mooncake, FAST 2025)
burstgpt  CSV: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type (BurstGPT, 2024)
sharegpt  JSON: a list of {"conversations": [{"from", "value"}]}; it has text and no times
========  =============================================================================================================

A row that cannot be used is refused by file and line, and the trace says how many were; the rest is served. A file
of which no row can be used is an error.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from harness.errors import UsageError, unknown
from harness.serving.synthetic import poisson_arrivals
from harness.serving.trace import SPELLED, Shape, Trace, TraceRequest, fit

FORMATS: Final = ("azure", "mooncake", "burstgpt", "sharegpt")
MOONCAKE_BLOCK: Final = 512
#: Tokens and seconds beyond these are damage, not a request: some 10^9 tokens, and 3,000 years.
LONGEST: Final = 2**30
LATEST: Final = 1e14


def load_trace(
    path: str | Path,
    shape: Shape | None = None,
    form: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
    seed: int = 0,
) -> Trace:
    """The trace in a file, fitted by ``shape``.

    Args:
        form: one of :data:`FORMATS`; read from the file when None.
        count_tokens: for ShareGPT, how many tokens a text has (a tokenizer's count). Without it a token is taken as
            four characters, and the trace's note says so.
        seed: for ShareGPT with a request rate, since it has no times: arrivals are drawn (Poisson).

    Raises:
        UsageError: no such file, an unknown format, or no row that can be used.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"trace {file}: no such file")
    form = form or detect_format(file)
    if form not in FORMATS:
        raise unknown("trace format", form, FORMATS)
    shape = shape or Shape()
    found: list[TraceRequest] = []
    refused: list[str] = []
    rows = _READERS[form](file) if form != "sharegpt" else _read_sharegpt(file, count_tokens or _four_characters)
    for where, row in rows:
        if isinstance(row, str):
            refused.append(f"{file.name}:{where}: {row}")
        else:
            found.append(row)
            # A long file is not read to its end for its first few requests.
            if shape.limit and len(found) >= shape.limit:
                break
    if not found:
        shown = "; ".join(refused[:SPELLED]) or "it is empty"
        raise UsageError(f"trace {file}: no row of the {form} format can be used: {shown}")
    note = ""
    if form == "sharegpt":
        if count_tokens is None:
            note = "a token is taken as four characters"
        if shape.request_rate:
            times = poisson_arrivals(len(found), shape.request_rate, seed)
            found = [replace(r, arrival=t) for r, t in zip(found, times, strict=True)]
    found.sort(key=lambda r: r.arrival)
    trace = Trace(
        name=file.name,
        requests=tuple(found),
        prefix_block_tokens=MOONCAKE_BLOCK if form == "mooncake" else 0,
        refused=tuple(refused),
        note=note,
    )
    return fit(trace, shape)


def detect_format(file: Path) -> str:
    """Which of :data:`FORMATS` a file is, from its first line.

    Raises:
        UsageError: none of them; the message lists what each begins with.
    """
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("["):
        return "sharegpt"
    if first.startswith("{"):
        return "mooncake"
    columns = {c.strip().strip('"').strip() for c in first.split(",")}
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
        return "azure"
    if {"Timestamp", "Request tokens", "Response tokens"} <= columns:
        return "burstgpt"
    raise UsageError(
        f"trace {file}: begins with {first[:60]!r}; expected TIMESTAMP,ContextTokens,GeneratedTokens (azure) "
        "or Timestamp,Model,Request tokens,Response tokens,… (burstgpt), a JSON object a line (mooncake) "
        "or a JSON list (sharegpt)"
    )


def _four_characters(text: str) -> int:
    return max(1, round(len(text) / 4))


#: Where it stands, and the request or the reason that there is none.
Row = tuple[str, TraceRequest | str]


def _whole(value: Any, what: str, least: int = 1) -> int:
    """A whole number from text or JSON; the error is the reason that the row is refused with."""
    number = _number(value)
    if number is None or number != int(number):
        raise ValueError(f"{what} is {_shown(value)}, not a whole number")
    if number < least:
        raise ValueError(f"{what} is {int(number)}, less than {least}")
    if number > LONGEST:
        raise ValueError(f"{what} is {_shown(value)}, more than {LONGEST}")
    return int(number)


def _seconds(value: Any, what: str) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= LATEST:
        raise ValueError(f"{what} is {_shown(value)}, not a time")
    return number


def _number(value: Any) -> float | None:
    """What text or JSON says, if that is a finite number."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    said = repr(value)
    return said if len(said) <= 40 else said[:40] + "…"


def _read_table(file: Path, parse: Callable[[dict[str, str]], TraceRequest]) -> Iterator[Row]:
    """Rows of a CSV file whose first line names the columns; a row is a line, so that damage ends with it."""
    names: list[str] = []
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                cells = next(csv.reader([line], strict=True))
                if not names:
                    names = [cell.strip() for cell in cells]
                    continue
                if len(cells) != len(names):
                    raise ValueError(f"{len(names)} columns expected")
                yield str(number), parse(dict(zip(names, cells, strict=True)))
            except csv.Error as err:
                yield str(number), f"not CSV: {err}"
            except ValueError as err:
                yield str(number), str(err)


def _read_azure(file: Path) -> Iterator[Row]:
    def parse(row: dict[str, str]) -> TraceRequest:
        return TraceRequest(
            _stamp(row["TIMESTAMP"].strip()),
            _whole(row["ContextTokens"], "ContextTokens"),
            _whole(row["GeneratedTokens"], "GeneratedTokens"),
        )

    return _read_table(file, parse)


def _stamp(text: str) -> float:
    """Seconds from a date and time with up to 100 ns digits; without a zone, UTC, since only differences are used."""
    whole, _, rest = text.partition(".")
    digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
    try:
        moment = datetime.fromisoformat(whole + rest[len(digits) :])
    except ValueError:
        raise ValueError(f"TIMESTAMP is {_shown(text)}, not a time") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() + float(f"0.{digits}0")


def _read_burstgpt(file: Path) -> Iterator[Row]:
    def parse(row: dict[str, str]) -> TraceRequest:
        return TraceRequest(
            _seconds(row["Timestamp"], "Timestamp"),
            _whole(row["Request tokens"], "Request tokens"),
            _whole(row["Response tokens"], "Response tokens"),
        )

    return _read_table(file, parse)


def _read_mooncake(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield str(number), _mooncake_row(line)
            except json.JSONDecodeError as err:
                yield str(number), f"not JSON: {err.msg} at column {err.colno}"
            except RecursionError:
                yield str(number), "not JSON: nested too deeply"
            except ValueError as err:
                yield str(number), str(err)


def _mooncake_row(line: str) -> TraceRequest:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    prompt = _whole(row.get("input_length"), "input_length")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ValueError("hash_ids is not a list of whole numbers of at least 0")
    if len(ids) > math.ceil(prompt / MOONCAKE_BLOCK):
        raise ValueError(f"{len(ids)} hash_ids of {MOONCAKE_BLOCK} tokens exceed input_length {prompt}")
    return TraceRequest(
        _seconds(row.get("timestamp"), "timestamp") / 1000.0,
        prompt,
        _whole(row.get("output_length"), "output_length"),
        tuple(ids),
    )


def _read_sharegpt(file: Path, count: Callable[[str], int]) -> Iterator[Row]:
    for index, (line, item) in enumerate(_items(file.read_text(encoding="utf-8-sig", errors="replace"))):
        where = f"{line} (item {index})"
        if isinstance(item, _Damage):
            yield where, str(item)
            continue
        try:
            prompt, answer = _first_turns(item)
        except ValueError as err:
            yield where, str(err)
            continue
        yield where, TraceRequest(0.0, max(1, count(prompt)), max(1, count(answer)), text=prompt)


class _Damage(ValueError):
    """Why a JSON list cannot be read any further."""


def _items(text: str) -> Iterator[tuple[int, Any]]:
    """Items of a JSON list one by one, each with its line; a :class:`_Damage` where the list cannot be read on."""
    decoder = json.JSONDecoder()
    line, seen = 1, 0
    at = _past_space(text, text.find("[") + 1)
    while text[at : at + 1] != "]":
        line, seen = line + text.count("\n", seen, at), at
        try:
            item, at = decoder.raw_decode(text, at)
            at = _past_space(text, at)
            if text[at : at + 1] not in (",", "]"):
                raise _Damage("a comma or the list's end is missing")
        except (ValueError, RecursionError) as err:
            why = err.msg if isinstance(err, json.JSONDecodeError) else err
            yield line, _Damage(f"not JSON from here on: {why}")
            return
        yield line, item
        if text[at] == ",":
            at = _past_space(text, at + 1)


def _past_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _first_turns(item: Any) -> tuple[str, str]:
    turns = item.get("conversations") if isinstance(item, dict) else None
    if not isinstance(turns, list):
        raise ValueError("has no list of conversations")
    said = [t.get("value") for t in turns[:2] if isinstance(t, dict)]
    if len(said) < 2:
        raise ValueError("has fewer than two turns")
    if not all(isinstance(text, str) and text for text in said):
        raise ValueError("a turn has no text")
    return str(said[0]), str(said[1])


_READERS: Final[dict[str, Callable[[Path], Iterator[Row]]]] = {
    "azure": _read_azure,
    "mooncake": _read_mooncake,
    "burstgpt": _read_burstgpt,
}
