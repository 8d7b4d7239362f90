"""Compacting: finished runs of one GPU type become one Parquet file, from which every byte of them can be had again.

Each row is one line: the whole line as it was written, the file and number that it had, and beside it what one
filters by as typed columns. The Parquet file is written beside its place, read back and compared with what it
replaces, and renamed; only then are the files removed that are wholly in it. A kill between the two leaves records
twice, which readers tolerate by their ids. Left alone: runs that are being written (the writer holds a lock; in an
object store, those written lately), empty files, and files with any line that is not a sound record.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from harness.errors import StoreError
from harness.history.flat import FLAT_VERSION, FlatTable, flatten
from harness.history.folders import Entry

if TYPE_CHECKING:
    from harness.history.store import Store

#: What a compacted row has beside the record's flat columns.
LINE_COLUMNS: Final = {"file": "string", "number": "int32", "line": "string"}

#: Lines held in memory before they are written as a row group, in bytes.
GROUP_BYTES: Final = 32 << 20
#: Records in one Parquet file; more begin another.
FILE_RECORDS: Final = 250_000
#: An object has no lock that would say that its writer lives; one younger than this is left alone.
REMOTE_MIN_AGE_S: Final = 600.0


@dataclass
class Compacted:
    """What a compaction did: records and files that moved, the Parquet files, and what was left alone and why."""

    records: int = 0
    files: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


def require_pyarrow() -> Any:
    """PyArrow's Parquet module.

    Raises:
        StoreError: it is not installed.
    """
    try:
        import pyarrow.parquet as parquet
    except ImportError as err:
        raise StoreError("Parquet files need PyArrow: pip install 'pairbench[history]'") from err
    return parquet


class LineFile:
    """A Parquet file of lines in the making."""

    def __init__(self, path: Path) -> None:
        self._table = FlatTable(LINE_COLUMNS)
        schema = self._table.schema().with_metadata({"pairbench_flat": str(FLAT_VERSION)})
        self._writer = require_pyarrow().ParquetWriter(path, schema, compression="zstd", compression_level=3)
        self._bytes = 0
        self.records = 0

    def add(self, record: dict[str, Any], file: str, number: int, line: bytes) -> None:
        """Add one line with the record that it holds."""
        self._table.add({**flatten(record), "file": file, "number": number, "line": line.rstrip(b"\n").decode()})
        self._bytes += len(line)
        self.records += 1
        if self._bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._table.count:
            self._writer.write_table(self._table.take())
        self._bytes = 0

    def close(self) -> None:
        """Write what is left and the footer."""
        self._flush()
        self._writer.close()


def stored_lines(store: Store, name: str) -> Iterator[tuple[str, int, bytes]]:
    """The lines of a compacted file as (file, number, line), as they were written.

    Raises:
        StoreError: the file is not a compacted file of the history.
    """
    with store.folder.open(name) as file:
        yield from _parquet_lines(file, f"store {store.url}: {name}")


def _parquet_lines(source: Any, label: str) -> Iterator[tuple[str, int, bytes]]:
    parquet = require_pyarrow()
    import pyarrow as pa

    try:
        table = parquet.ParquetFile(source)
        if not {"file", "number", "line"} <= set(table.schema_arrow.names):
            raise StoreError(f"{label}: foreign: a Parquet file, but not of the history")
        for batch in table.iter_batches(batch_size=2048, columns=["file", "number", "line"]):
            columns = (batch.column(key).to_pylist() for key in ("file", "number", "line"))
            for file, number, line in zip(*columns, strict=True):
                yield file, number, line.encode() + b"\n"
    except (pa.ArrowInvalid, OSError) as err:
        raise StoreError(f"{label}: torn or foreign: not a readable Parquet file: {err}") from err


def compact(store: Store, min_age_s: float | None = None) -> Compacted:
    """Turn every finished, sound run of the store into Parquet.

    Args:
        min_age_s: leave files alone that changed later than this many seconds ago; by default 0 in a folder, where
            the writers' locks tell, and 600 in an object store.

    Raises:
        StoreError: the store cannot be written, another compaction is at work, or a written file does not hold
            what it should (nothing is removed then).
    """
    require_pyarrow()
    if min_age_s is None:
        min_age_s = 0.0 if store.path is not None else REMOTE_MIN_AGE_S
    done = Compacted()
    with _alone(store):
        groups: dict[str, list[Entry]] = {}
        for entry in store.entries():
            if entry.name.count("/") == 1 and entry.name.endswith(".jsonl"):
                groups.setdefault(entry.name.split("/")[0], []).append(entry)
        for gpu, entries in sorted(groups.items()):
            _compact_group(store, gpu, entries, min_age_s, done)
    return done


def _compact_group(store: Store, gpu: str, entries: Iterable[Entry], min_age_s: float, done: Compacted) -> None:
    batch: _Batch | None = None
    try:
        for entry in entries:
            lines = _sound_lines(store, entry, min_age_s)
            if isinstance(lines, str):
                done.left.append((entry.name, lines))
                continue
            batch = batch or _Batch(store, gpu)
            batch.add(entry, lines)
            if batch.out.records >= FILE_RECORDS:
                batch.finish(done)
                batch = None
        if batch is not None:
            batch.finish(done)
            batch = None
    finally:
        if batch is not None:
            batch.abandon()


class _Batch:
    """One Parquet file in the making, and the runs that go into it."""

    def __init__(self, store: Store, gpu: str) -> None:
        self._store = store
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        self._name = f"{gpu}/compacted-{stamp}-{secrets.token_hex(4)}.parquet"
        folder = store.path / gpu if store.path is not None else Path(tempfile.gettempdir())
        self._path = folder / f".{self._name.split('/')[1]}.tmp"
        self._entries: list[Entry] = []
        self._digests: dict[str, str] = {}
        try:
            self.out = LineFile(self._path)
        except OSError as err:
            raise StoreError(f"store {store.url}: cannot write {self._path}: {err}") from err

    def add(self, entry: Entry, lines: list[tuple[bytes, dict[str, Any]]]) -> None:
        digest = hashlib.sha256()
        for number, (line, record) in enumerate(lines, 1):
            digest.update(line)
            self.out.add(record, entry.name, number, line)
        self._entries.append(entry)
        self._digests[entry.name] = digest.hexdigest()

    def finish(self, done: Compacted) -> None:
        """Close, read back, put in place, and remove what is wholly in it and has not changed since."""
        try:
            self.out.close()
        except OSError as err:
            self.abandon()
            raise StoreError(f"store {self._store.url}: cannot write {self._path}: {err}") from err
        if _digests(self._path) != self._digests:
            self.abandon()
            raise StoreError(f"store {self._store.url}: {self._name} did not read back as written; nothing was removed")
        self._store.folder.adopt(self._path, self._name)
        done.written.append(self._name)
        done.records += self.out.records
        now = {entry.name: entry for entry in self._store.entries()}
        for entry in self._entries:
            if now.get(entry.name) == entry:
                self._store.folder.remove(entry.name)
                done.files.append(entry.name)
            else:
                done.left.append((entry.name, "changed while it was compacted; its records are in both places"))

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            self.out.close()
        self._path.unlink(missing_ok=True)


def _digests(path: Path) -> dict[str, str]:
    found: dict[str, Any] = {}
    with open(path, "rb") as source:
        for file, _, line in _parquet_lines(source, str(path)):
            found.setdefault(file, hashlib.sha256()).update(line)
    return {file: digest.hexdigest() for file, digest in found.items()}


def _sound_lines(store: Store, entry: Entry, min_age_s: float) -> list[tuple[bytes, dict[str, Any]]] | str:
    """The lines of a finished run with their records, or why it is left alone."""
    from harness.history.store import parse_line

    if entry.size == 0:
        return "empty"
    if entry.age_s(time.time()) < min_age_s:
        return f"written less than {min_age_s:.0f} s ago"
    if store.path is not None and _is_locked(store.path / entry.name):
        return "being written"
    lines: list[tuple[bytes, dict[str, Any]]] = []
    for number, line in enumerate(store.folder.lines(entry.name), 1):
        record = parse_line(line)
        if isinstance(record, str):
            return f"damaged: line {number}: {record}"
        if not line.endswith(b"\n"):
            return f"damaged: line {number} has no end"
        lines.append((line, record))
    return lines


def _is_locked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system: the age decides alone
        return False
    finally:
        os.close(handle)
    return False


@contextlib.contextmanager
def _alone(store: Store) -> Iterator[None]:
    """Hold the store's compaction lock. Two compactions of one object store only make duplicates."""
    if store.path is None:
        yield
        return
    try:
        handle = os.open(store.path / ".compact.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except FileNotFoundError as err:
        raise StoreError(f"store {store.url}: no such folder") from err
    except OSError as err:
        raise StoreError(f"store {store.url}: cannot be written: {err.strerror}") from err
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as err:
        os.close(handle)
        raise StoreError(f"store {store.url}: another compaction is at work") from err
    try:
        yield
    finally:
        os.close(handle)


def restore(store: Store, folder: Path) -> list[str]:
    """Write the runs of every compacted file into a folder again, byte for byte; gives their names.

    Raises:
        StoreError: a file exists there already, or cannot be written.
    """
    written: list[str] = []
    for entry in store.entries():
        if not entry.name.endswith(".parquet"):
            continue
        current = ""
        for file, _, line in stored_lines(store, entry.name):
            path = folder / file
            if file != current and path.exists():
                raise StoreError(f"{path} exists already; restore into an empty folder")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "ab") as out:
                    out.write(line)
            except OSError as err:
                raise StoreError(f"cannot write {path}: {err.strerror}") from err
            if file != current:
                written.append(file)
            current = file
    return written
