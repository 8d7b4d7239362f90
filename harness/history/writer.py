"""Writing one run: one file, one line a record, nothing overwritten, and nothing lost when the disk refuses.

A local append is a single ``write`` of a whole line, so a kill loses the record in hand at most. When the store
refuses a line (full, read-only, gone), the line goes to a spill folder laid out as a store, the run goes on, and
:meth:`close` ends with a :class:`StoreError` that names both places. An object store has no append: the writer keeps
the run's lines and rewrites the run's own object after each record, which touches nobody else's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from harness.errors import StoreError
from harness.history.folders import LocalFolder, RemoteFolder
from harness.record import to_line

#: macOS has no fdatasync.
_sync = getattr(os, "fdatasync", os.fsync)
#: A sync slower than this would make an append dear, so that the file is then synced at its end only.
SLOW_SYNC_S = 0.002
#: An object of a long run is closed at this size and the next begun, so that rewriting stays cheap.
PART_BYTES = 4 << 20


class RunWriter(Protocol):
    """A run's file, open for appending. Use it as a context manager, or call :meth:`close`."""

    name: str

    @property
    def spilled(self) -> Path | None:
        """The spill folder, while the store refuses lines; else None."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.

        Raises:
            RecordError: the record is unfit; nothing is written.
            StoreError: neither the store nor any spill folder took it.
        """

    def close(self) -> None:
        """Make everything durable.

        Raises:
            StoreError: some records lie in the spill folder; it says how many, where, why, and what to do.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class Spill:
    """A file in another folder that takes the lines that the store refused."""

    def __init__(self, name: str) -> None:
        stem = name.removesuffix(".jsonl")
        self.name = f"{stem}-spilled.jsonl"
        self.root: Path | None = None
        self.count = 0
        self.reason = ""
        self._fd = -1

    def take(self, line: bytes, reason: str) -> None:
        """Keep a line; the first one picks the folder.

        Raises:
            StoreError: no folder takes it.
        """
        self.reason = self.reason or reason
        if self._fd < 0:
            self._open()
        try:
            _write_whole(self._fd, line)
        except OSError as err:
            raise StoreError(f"{reason}; and {self.root} refused it too: {err.strerror}; the record is lost") from err
        self.count += 1

    def _open(self) -> None:
        tried = []
        user = getattr(os, "getuid", lambda: 0)()
        for place in (Path(tempfile.gettempdir()), Path.home(), Path.cwd(), Path("/dev/shm")):
            root = place / f"pairbench-spilled-{user}"
            path = root / self.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
            except OSError as err:
                tried.append(f"{path.parent}: {err.strerror}")
                continue
            self.root = root
            return
        raise StoreError(f"{self.reason}; no other folder could be written either ({'; '.join(tried)})")

    def discard(self) -> None:
        """Forget the spilled lines: the store has taken them after all."""
        if self._fd >= 0 and self.root is not None:
            os.close(self._fd)
            (self.root / self.name).unlink(missing_ok=True)
        self._fd, self.root, self.count, self.reason = -1, None, 0, ""

    def close(self, url: str) -> None:
        """Sync and close.

        Raises:
            StoreError: there are spilled lines.
        """
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        raise StoreError(
            f"{self.reason}; {self.count} record(s) were kept in {self.root}/{self.name}. "
            f"That folder is a store of its own (--store {self.root}); "
            f"to mend the history, make room and copy the file to the same place under {url}"
        )


class LocalRun:
    """A run in a local folder."""

    def __init__(self, folder: LocalFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        self._path = folder.path / name
        self._spill = Spill(name)
        self._sync = True
        self._closed = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o644)
        except FileExistsError as err:
            raise StoreError(f"store {folder.url}: {name} exists already; a run is never overwritten") from err
        except OSError as err:
            raise StoreError(
                f"store {folder.url}: cannot write {name}: {err.strerror}; give another folder with --store"
            ) from err
        # Says "still being written" to the compactor; the kernel lets go of it when the process dies.
        # Some network file systems have no locks; the file is then as safe as its run id is unique.
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        self._size = 0

    @property
    def spilled(self) -> Path | None:
        """The spill folder, once the store has refused a line."""
        return self._spill.root

    def append(self, record: Mapping[str, Any]) -> None:
        line = to_line(record).encode()
        if self._closed:
            raise StoreError(f"store {self._folder.url}: {self.name} is closed")
        if self._spill.root is not None:
            self._spill.take(line, "")
            return
        try:
            _write_whole(self._fd, line)
        except OSError as err:
            # Part of the line may be there: cut it off, so that no torn line stays behind.
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            self._spill.take(line, f"store {self._folder.url}: cannot append to {self.name}: {err.strerror}")
            return
        self._size += len(line)
        if self._sync:
            self._durable()

    def _durable(self) -> None:
        start = time.perf_counter()
        try:
            _sync(self._fd)
        except OSError:  # a file system that cannot sync has still taken the line
            self._sync = False
        if time.perf_counter() - start > SLOW_SYNC_S:
            self._sync = False

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            os.fsync(self._fd)
        os.close(self._fd)
        self._spill.close(self._folder.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class RemoteRun:
    """A run in an object store."""

    def __init__(self, folder: RemoteFolder, name: str) -> None:
        self.name = name
        self._folder = folder
        self._lines: list[bytes] = []
        self._bytes = 0
        self._part = 1
        self._spill = Spill(name)
        self._closed = False
        if folder.exists(name):
            raise StoreError(f"store {folder.url}: {name} exists already; a run is never overwritten")
        folder.replace(name, b"")

    @property
    def spilled(self) -> Path | None:
        """The spill folder, while the store refuses lines."""
        return self._spill.root

    def append(self, record: Mapping[str, Any]) -> None:
        line = to_line(record).encode()
        if self._closed:
            raise StoreError(f"store {self._folder.url}: {self.name} is closed")
        self._lines.append(line)
        self._bytes += len(line)
        self._put(line)
        if self._bytes >= PART_BYTES and self._spill.root is None:
            self._part += 1
            self._lines, self._bytes = [], 0

    def _put(self, line: bytes) -> None:
        part = self.name if self._part == 1 else f"{self.name.removesuffix('.jsonl')}-part{self._part}.jsonl"
        try:
            self._folder.replace(part, b"".join(self._lines))
        except StoreError as err:
            if line:
                self._spill.take(line, str(err))
            return
        self._spill.discard()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._spill.root is not None:  # one more try: the network may be back
            self._put(b"")
        self._spill.close(self._folder.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _write_whole(fd: int, line: bytes) -> None:
    """One write of the whole line; what a nearly full disk left over is tried once more, which raises its reason."""
    done = os.write(fd, line)
    while done < len(line):
        done += os.write(fd, line[done:])
