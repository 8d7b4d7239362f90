"""The reader's index: flat rows of whatever is not compacted in a local folder, kept in the user's cache.

A query never parses JSON. A compacted file in a local folder is read where it lies; the lines of every other file
are flattened once into Parquet *segments*, and a manifest says which file (by size and stamp) is in which segment.
When a file grows, its old rows are left out by name and its new ones go into another segment, so that new records
cost only themselves. Segments are never changed, and removed only some time after nobody needs them.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from harness.errors import StoreError
from harness.history.compact import require_pyarrow
from harness.history.flat import FLAT_VERSION, FlatTable, columns_digest, flatten
from harness.history.folders import Entry
from harness.history.store import FOREIGN_FILE, Damage, Store, kind_of

#: Beside the flat columns: the store, the file that holds the line, the file it was written to, and its number there.
PLACE_COLUMNS: Final = {"store": "string", "holder": "string", "file": "string", "number": "int32"}
GROUP_ROWS: Final = 20_000
#: Left-out files in a segment, and segments in all, beyond which segments are written anew.
MAX_STALE: Final = 200
MAX_SEGMENTS: Final = 24
#: A segment that nobody names is kept this long for readers that still do.
GRACE_S: Final = 3600.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Segment:
    """A Parquet file of flat rows, and the files whose rows in it are out of date."""

    path: Path
    stale: tuple[str, ...] = ()
    #: The store of a compacted file that is read in place; empty for a segment, whose rows say it themselves.
    store: str = ""
    holder: str = ""


@dataclass
class Snapshot:
    """Everything that a query needs to know of a store at one moment."""

    state: str
    segments: list[Segment] = field(default_factory=list)
    damage: list[Damage] = field(default_factory=list)


def cache_folder() -> Path:
    """Where indexes are kept: ``$PAIRBENCH_CACHE``, or ``pairbench`` under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    named = os.environ.get("PAIRBENCH_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pairbench"


def state_of(entries: Iterable[Entry]) -> str:
    """A fingerprint of a store's files by names, sizes and stamps: it changes whenever a record is added."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.size}\0{entry.stamp}\n".encode())
    return digest.hexdigest()[:16]


def store_state(url: str | Path) -> str:
    """The fingerprint of a store as it is now.

    Raises:
        StoreError: the store cannot be listed.
    """
    return state_of(Store(url).entries())


class Index:
    """The index of one store."""

    def __init__(self, store: Store, cache: Path | None = None) -> None:
        self.store = store
        key = hashlib.sha256(str(store.path.resolve() if store.path else store.url).encode()).hexdigest()[:16]
        self.folder = _usable((cache or cache_folder()) / "index", key)
        self._manifest_path = self.folder / "manifest.json"

    def refresh(self, progress: Progress | None = None) -> Snapshot:
        """Bring the index up to the store's present state.

        Args:
            progress: called with (bytes read, bytes to read) while files are flattened.

        Raises:
            StoreError: the store cannot be listed, or the cache cannot be written.
        """
        require_pyarrow()
        entries = self.store.entries()
        state = state_of(entries)
        manifest = self._load()
        if manifest["state"] != state:
            with self._locked():
                entries = self.store.entries()  # as it is now: whoever held the lock may have seen more than we did
                state = state_of(entries)
                manifest = self._load()
                if manifest["state"] != state:
                    manifest = self._update(manifest, entries, state, progress)
        return self._snapshot(manifest)

    def _load(self) -> dict[str, Any]:
        try:
            manifest = json.loads(self._manifest_path.read_bytes())
            if manifest["columns"] == columns_digest() and all(
                (self.folder / name).exists() for name in _segments(manifest)
            ):
                return dict(manifest)
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or another version's: begin anew
            pass
        return {"columns": columns_digest(), "state": "", "sources": {}, "damage": []}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / "lock", "w") as handle:
            with contextlib.suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _update(
        self, manifest: dict[str, Any], entries: list[Entry], state: str, progress: Progress | None
    ) -> dict[str, Any]:
        known: dict[str, Any] = manifest["sources"]
        sources: dict[str, Any] = {}
        fresh: list[Entry] = []
        foreign: list[list[Any]] = []
        for entry in entries:
            kind = kind_of(entry.name)
            old = known.get(entry.name)
            if kind == "foreign":
                foreign.append([self.store.label(entry.name), 0, FOREIGN_FILE])
            elif kind == "known":
                continue
            elif old is not None and (old["size"], old["stamp"]) == (entry.size, entry.stamp):
                sources[entry.name] = old
            elif kind == "parquet" and self._in_place(entry.name):
                sources[entry.name] = _source(entry, "", [])
            else:
                fresh.append(entry)
        stale = dict(manifest.get("stale", {}))
        for name, old in known.items():
            if old["segment"] and sources.get(name) is not old:
                stale.setdefault(old["segment"], []).append(name)
        # A segment with many left-out files, or one of too many, is flattened anew from its files.
        by_segment = _by_segment(sources)
        worn = {name for name in by_segment if len(stale.get(name, ())) > MAX_STALE}
        if len(by_segment) > MAX_SEGMENTS:
            worn |= set(by_segment)
        moved = {entry.name: entry for entry in entries if sources.get(entry.name, {}).get("segment") in worn}
        merged = self._merge(worn, stale, sources) if worn else None
        if merged is not None:
            for name in moved:
                sources[name] = {**sources[name], "segment": merged}
        sources.update(self._flatten(fresh, progress))
        live = set(_by_segment(sources))
        new = {
            "columns": columns_digest(),
            "state": state,
            "sources": sources,
            "damage": foreign,
            "stale": {name: sorted(set(files)) for name, files in stale.items() if name in live},
        }
        self._save(new)
        self._clean(live)
        return new

    def _in_place(self, name: str) -> bool:
        """Whether a compacted file carries the flat columns of this version in a local folder."""
        if self.store.path is None:
            return False
        try:
            schema = require_pyarrow().read_schema(self.store.path / name)
        except (OSError, ValueError):  # torn or foreign: flattening it says so
            return False
        return (schema.metadata or {}).get(b"pairbench_flat") == str(FLAT_VERSION).encode()

    def _flatten(self, entries: list[Entry], progress: Progress | None) -> dict[str, Any]:
        if not entries:
            return {}
        total, done = sum(entry.size for entry in entries), 0
        name = f"segment-{secrets.token_hex(8)}.parquet"
        table = FlatTable(PLACE_COLUMNS)
        sources: dict[str, Any] = {}
        temporary = self.folder / f".{name}.tmp"
        try:
            with require_pyarrow().ParquetWriter(temporary, table.schema(), compression="lz4") as writer:
                for entry in entries:
                    damage: list[Damage] = []
                    try:
                        for file, number, record in self.store.scan_file(entry.name, damage):
                            place = {"store": self.store.url, "holder": entry.name, "file": file, "number": number}
                            table.add({**flatten(record), **place})
                            if table.count >= GROUP_ROWS:
                                writer.write_table(table.take())
                    except StoreError as err:
                        if not self.store.folder.exists(entry.name):
                            continue  # compacted in this moment; the next refresh sees the new file
                        damage.append(Damage(self.store.label(entry.name), 0, str(err)))
                    sources[entry.name] = _source(entry, name, [[d.file, d.line, d.reason] for d in damage])
                    done += entry.size
                    if progress is not None:
                        progress(done, total)
                if table.count:
                    writer.write_table(table.take())
            temporary.rename(self.folder / name)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"the index in {self.folder} cannot be written: {err}; set PAIRBENCH_CACHE") from err
        return sources

    def _merge(self, worn: set[str], stale: dict[str, list[str]], sources: dict[str, Any]) -> str:
        """Write the live rows of several segments into one."""
        parquet = require_pyarrow()
        import pyarrow as pa
        import pyarrow.compute as pc

        name = f"segment-{secrets.token_hex(8)}.parquet"
        temporary = self.folder / f".{name}.tmp"
        with parquet.ParquetWriter(temporary, FlatTable(PLACE_COLUMNS).schema(), compression="lz4") as writer:
            for old in sorted(worn):
                # A holder may be out of date in one segment and alive in another: each is filtered by its own list.
                left_out = pa.array(stale.get(old, []), pa.string())
                for batch in parquet.ParquetFile(self.folder / old).iter_batches(batch_size=GROUP_ROWS):
                    writer.write_batch(batch.filter(pc.invert(pc.is_in(batch.column("holder"), value_set=left_out))))
        temporary.rename(self.folder / name)
        return name

    def _save(self, manifest: dict[str, Any]) -> None:
        temporary = self.folder / f".manifest.{secrets.token_hex(4)}.tmp"
        try:
            temporary.write_text(json.dumps(manifest))
            temporary.replace(self._manifest_path)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"the index in {self.folder} cannot be written: {err}; set PAIRBENCH_CACHE") from err

    def _clean(self, live: set[str]) -> None:
        for path in (*self.folder.glob("segment-*.parquet"), *self.folder.glob(".*.tmp")):
            with contextlib.suppress(OSError):
                if path.name not in live and time.time() - path.stat().st_mtime > GRACE_S:
                    path.unlink()

    def _snapshot(self, manifest: dict[str, Any]) -> Snapshot:
        found = Snapshot(f"{manifest['state']}")
        stale = manifest.get("stale", {})
        for name in sorted(_by_segment(manifest["sources"])):
            found.segments.append(Segment(self.folder / name, tuple(stale.get(name, ()))))
        for name, source in manifest["sources"].items():
            if not source["segment"] and self.store.path is not None:
                found.segments.append(Segment(self.store.path / name, (), self.store.url, name))
            found.damage.extend(Damage(*item) for item in source["damage"])
        found.damage.extend(Damage(*item) for item in manifest["damage"])
        return found


def _source(entry: Entry, segment: str, damage: list[list[Any]]) -> dict[str, Any]:
    return {"size": entry.size, "stamp": entry.stamp, "segment": segment, "damage": damage}


def _by_segment(sources: dict[str, Any]) -> set[str]:
    return {source["segment"] for source in sources.values() if source["segment"]}


def _segments(manifest: dict[str, Any]) -> set[str]:
    return _by_segment(manifest["sources"])


def _usable(parent: Path, key: str) -> Path:
    """The index folder; a temporary one where the cache cannot be written."""
    folder = parent / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="pairbench-index-"))
