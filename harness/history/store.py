"""The store: ``<root>/<gpu type>/<run id>.jsonl``, one file a run, and what compacting made of old ones.

Nothing is overwritten, and nothing is dropped in silence: a torn line, a foreign file and a record of a newer schema
are :class:`Damage`, named by file and line, and everything else is read.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import DamagedStore, StoreError
from harness.history.folders import Entry, LocalFolder, RemoteFolder, open_folder
from harness.history.shape import misshapen
from harness.history.writer import LocalRun, RemoteRun, RunWriter
from harness.record import SCHEMA, problems

#: Files that may lie in a store and hold no records.
KNOWN_FOREIGN = ("README.md", "acknowledged.toml")
FOREIGN_FILE = "not a file of the history: <gpu>/<run>.jsonl is expected"
#: Longest list of damage that an error message spells out.
SHOWN = 20


@dataclass(frozen=True)
class Damage:
    """What could not be read: the file, its line (from 1; 0 for the whole file), and why."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}" if self.line else f"{self.file}: {self.reason}"


@dataclass
class Reading:
    """The records of one or several stores, read once: iterate, then look at ``damage``."""

    stores: tuple[Store, ...]
    damage: list[Damage] = field(default_factory=list)
    duplicates: int = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.damage.clear()
        self.duplicates = 0
        seen: set[str] = set()
        for store in self.stores:
            for _, _, record in store.scan(self.damage):
                key = str(record["id"])
                if key in seen:
                    self.duplicates += 1
                    continue
                seen.add(key)
                yield record

    def raise_damage(self) -> None:
        """Raise what was found, if anything.

        Raises:
            DamagedStore: lists files, lines and reasons.
        """
        if self.damage:
            raise DamagedStore(describe(self.damage))


def describe(damage: Iterable[Damage], nothing_left: bool = False) -> str:
    """A message that lists the damage, one a line. nothing_left: there was not one record beside it."""
    found = list(damage)
    rest = "and it holds no record beside" if nothing_left else "the rest was"
    lines = [f"  {item}" for item in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  … and {len(found) - SHOWN} more; 'pairbench history verify' lists them all")
    return "\n".join([f"{len(found)} part(s) of the history could not be read; {rest}:", *lines])


class Store:
    """A history in a folder or behind an object-store URL.

    Raises:
        StoreError: the URL is of an unknown kind, or what it needs is not installed.
    """

    def __init__(self, url: str | Path) -> None:
        self.folder: LocalFolder | RemoteFolder = open_folder(url)
        self.url = self.folder.url

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    @property
    def path(self) -> Path | None:
        """The local folder, or None for an object store."""
        return self.folder.path if isinstance(self.folder, LocalFolder) else None

    def open_run(self, gpu: str, run_id: str) -> RunWriter:
        """Create the file of a run, before anything is measured.

        Raises:
            StoreError: the store cannot be written, or the run exists.
        """
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_id):
            raise StoreError(f"run id {run_id!r} cannot name a file: use letters, digits, '.', '_' and '-'")
        name = f"{gpu_folder(gpu)}/{run_id}.jsonl"
        if isinstance(self.folder, LocalFolder):
            return LocalRun(self.folder, name)
        return RemoteRun(self.folder, name)

    def entries(self) -> list[Entry]:
        """Every visible file of the store."""
        return self.folder.entries()

    def read(self) -> Reading:
        """The records of the whole store, each id once, compacted or not."""
        return Reading((self,))

    def scan(self, damage: list[Damage]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """Every sound record as (file, line, record), duplicates included; what is unsound goes to ``damage``."""
        seen: set[str] = set()
        again = True
        while again:  # a file that was compacted while we read is found in a Parquet file of a fresh listing
            again = False
            for entry in self.entries():
                if entry.name in seen:
                    continue
                seen.add(entry.name)
                try:
                    yield from self.scan_file(entry.name, damage)
                except StoreError as err:
                    if self.folder.exists(entry.name):
                        damage.append(Damage(self.label(entry.name), 0, str(err)))
                    else:
                        again = True

    def label(self, name: str) -> str:
        """A file's name as messages show it."""
        return f"{self.url}/{name}"

    def scan_file(self, name: str, damage: list[Damage]) -> Iterator[tuple[str, int, dict[str, Any]]]:
        """The sound records of one file."""
        kind = kind_of(name)
        if kind == "jsonl":
            lines: Iterator[tuple[str, int, bytes]] = (
                (name, number, line) for number, line in enumerate(self.folder.lines(name), 1)
            )
        elif kind == "parquet":
            from harness.history.compact import stored_lines

            lines = stored_lines(self, name)
        else:
            if kind == "foreign":
                damage.append(Damage(self.label(name), 0, FOREIGN_FILE))
            return
        for file, number, line in lines:
            record = parse_line(line)
            if isinstance(record, str):
                damage.append(Damage(self.label(file), number, record))
            else:
                yield file, number, record


def kind_of(name: str) -> str:
    """``jsonl``, ``parquet``, ``known`` (may lie there) or ``foreign``, by the name alone."""
    if name in KNOWN_FOREIGN:
        return "known"
    if name.count("/") == 1:
        if name.endswith(".jsonl"):
            return "jsonl"
        if name.endswith(".parquet"):
            return "parquet"
    return "foreign"


def parse_line(line: bytes) -> dict[str, Any] | str:
    """The record of a line, or why it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return "torn or foreign: not a line of JSON" if line.endswith(b"\n") else "torn: the line breaks off"
    if not isinstance(record, dict) or "schema" not in record:
        return "foreign: JSON, but not a record"
    schema = record["schema"]
    if not isinstance(schema, int) or isinstance(schema, bool):
        return f"foreign: schema {schema!r} is not a number"
    if schema > SCHEMA:
        return f"schema {schema} is newer than the {SCHEMA} that this pairbench reads: upgrade pairbench"
    try:
        found = [*problems(record), *misshapen(record)]
    except RecursionError:
        return "foreign: JSON nested deeper than any record"
    return f"unfit: {'; '.join(found)}" if found else record


def gpu_folder(gpu: str) -> str:
    """The folder of a GPU type: its name with everything that a file system or a URL minds replaced by ``-``.

    Raises:
        StoreError: nothing is left of the name.
    """
    folder = re.sub(r"[^A-Za-z0-9._+-]+", "-", gpu).strip("-.")
    if not folder:
        raise StoreError(f"GPU type {gpu!r} cannot name a folder")
    return folder


def data_folder() -> Path:
    """The user's data folder: ``$PAIRBENCH_DATA``, or ``pairbench`` under ``$XDG_DATA_HOME`` or ``~/.local/share``."""
    named = os.environ.get("PAIRBENCH_DATA")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "pairbench"


def require_writable(folder: Path, what: str) -> None:
    """Makes a folder of the user's data, and finds out now whether ``what`` can be kept in it.

    Raises:
        StoreError: it cannot be written; names the folder and the way out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".pairbench-"):
            pass
    except OSError as err:
        raise StoreError(
            f"{folder} cannot be written ({err.strerror}), and {what} are kept there: "
            "set PAIRBENCH_DATA to a folder that can be written"
        ) from err


def default_store() -> Path:
    """Where a run is kept when nobody says otherwise."""
    return data_folder() / "history"


def checkout_store() -> Path | None:
    """``results/history`` of the checkout that one stands in, or that this code runs from; None when there is none."""
    here = Path.cwd()
    for root in (here, *here.parents, Path(__file__).resolve().parents[2]):
        folder = root / "results" / "history"
        if folder.is_dir() and (root / "harness" / "record.py").is_file():
            return folder
    return None


def stores_to_read(store_option: str | Path | None = None) -> list[Store]:
    """The stores that a reading command looks at: the one named, or else the user's own and the checkout's.

    Raises:
        StoreError: the named local folder does not exist.
    """
    if store_option is not None:
        store = Store(store_option)
        if store.path is not None and not store.path.exists():
            raise StoreError(f"store {store.url}: no such folder")
        return [store]
    folders = [default_store()]
    checkout = checkout_store()
    if checkout is not None and checkout.resolve() != folders[0].resolve():
        folders.append(checkout)
    return [Store(folder) for folder in folders]


def read_all(stores: Iterable[Store]) -> Reading:
    """The records of several stores as one history, each id once."""
    return Reading(tuple(stores))
