"""Where a store lives: a local folder, or an object store behind fsspec. The store itself sees one small form of both.

Names are relative to the store's root and use ``/``: ``h200/20260131T235959Z-1f2e3d4c.jsonl``.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.errors import StoreError


@dataclass(frozen=True)
class Entry:
    """A file of the store: its name, size in bytes, a stamp that changes with its content, and when that was.

    ``changed`` is in seconds since 1970; 0 where the place does not say.
    """

    name: str
    size: int
    stamp: str
    changed: float = 0.0

    def age_s(self, now: float) -> float:
        """Seconds since the last change; infinite where that is unknown."""
        return now - self.changed if self.changed else float("inf")


class Folder(Protocol):
    """What a store needs of the place where it lives. Every method raises StoreError, which names store and file."""

    url: str

    def entries(self) -> list[Entry]:
        """Every visible file under the root, sorted by name; empty when the root does not exist."""

    def read(self, name: str) -> bytes:
        """The content of a file."""

    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, each with its end of line where it has one."""

    def replace(self, name: str, content: bytes) -> None:
        """Write a whole file so that a reader sees the old content or the new one, never a part."""

    def adopt(self, path: Path, name: str) -> None:
        """Move a finished local file to this name, atomically."""

    def open(self, name: str) -> Any:
        """A seekable binary file."""

    def exists(self, name: str) -> bool:
        """Whether the file exists."""

    def remove(self, name: str) -> None:
        """Remove a file; no error when it is gone already."""


def is_hidden(name: str) -> bool:
    """Whether any part of the name begins with a dot: temporary files and tools' own files, never records."""
    return any(part.startswith(".") for part in name.split("/"))


class LocalFolder:
    """A folder on this machine."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.url = str(self.path)

    def entries(self) -> list[Entry]:
        if not self.path.exists():
            return []
        if not self.path.is_dir():
            raise StoreError(f"store {self.url}: not a folder; give the folder that holds <gpu>/<run>.jsonl")
        found: list[Entry] = []
        self._walk(str(self.path), "", found)
        return sorted(found, key=lambda entry: entry.name)

    def _walk(self, folder: str, prefix: str, found: list[Entry]) -> None:
        try:
            with os.scandir(folder) as items:
                for item in items:
                    if item.name.startswith("."):
                        continue
                    if item.is_dir():
                        self._walk(item.path, f"{prefix}{item.name}/", found)
                        continue
                    try:
                        state = item.stat()
                    except FileNotFoundError:  # compacted away, or a dangling link, between the listing and now
                        continue
                    found.append(Entry(prefix + item.name, state.st_size, str(state.st_mtime_ns), state.st_mtime))
        except OSError as err:
            raise StoreError(f"store {self.url}: cannot list {folder}: {err.strerror}") from err

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except OSError as err:
            raise StoreError(f"store {self.url}: cannot read {name}: {err.strerror}") from err

    def lines(self, name: str) -> Iterator[bytes]:
        try:
            with open(self.path / name, "rb") as file:
                yield from file
        except OSError as err:
            raise StoreError(f"store {self.url}: cannot read {name}: {err.strerror}") from err

    def replace(self, name: str, content: bytes) -> None:
        target = self.path / name
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except OSError as err:
            temporary.unlink(missing_ok=True)
            raise StoreError(f"store {self.url}: cannot write {name}: {err.strerror}") from err

    def adopt(self, path: Path, name: str) -> None:
        target = self.path / name
        try:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            os.replace(path, target)
            _sync_folder(target.parent)
        except OSError as err:
            raise StoreError(f"store {self.url}: cannot write {name}: {err.strerror}") from err

    def open(self, name: str) -> Any:
        try:
            return open(self.path / name, "rb")
        except OSError as err:
            raise StoreError(f"store {self.url}: cannot read {name}: {err.strerror}") from err

    def exists(self, name: str) -> bool:
        return (self.path / name).exists()

    def remove(self, name: str) -> None:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as err:
            raise StoreError(f"store {self.url}: cannot remove {name}: {err.strerror}") from err


class RemoteFolder:
    """A prefix of an object store, through fsspec. Objects are written whole, so every write is atomic."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            from fsspec.core import url_to_fs
        except ImportError as err:
            raise StoreError(f"store {url}: object stores need fsspec: pip install 'pairbench[s3]'") from err
        try:
            # Listings are never cached: a store is read while others write it.
            fs, root = url_to_fs(self.url, use_listings_cache=False)
        except ImportError as err:
            raise StoreError(f"store {url}: {err}; pip install 'pairbench[s3]'") from err
        except ValueError as err:
            raise StoreError(f"store {url}: {err}") from err
        self.fs: Any = fs
        self.root = str(root).rstrip("/")

    def entries(self) -> list[Entry]:
        try:
            self.fs.invalidate_cache()
            listing = self.fs.find(self.root, detail=True)
        except FileNotFoundError as err:
            if self._bucket_missing():
                raise StoreError(f"store {self.url}: no such bucket") from err
            return []
        except Exception as err:  # every fsspec backend raises its own kinds; all of them mean the same here
            raise StoreError(f"store {self.url}: cannot list it: {err}") from err
        found = []
        for path, info in listing.items():
            name = str(path)[len(self.root) :].lstrip("/")
            if name and not is_hidden(name):
                size = int(info.get("size") or 0)
                stamp = str(info.get("ETag") or info.get("mtime") or info.get("LastModified") or info.get("created"))
                when = info.get("LastModified") or info.get("created")
                changed = when.timestamp() if hasattr(when, "timestamp") else 0.0
                found.append(Entry(name, size, stamp.strip('"'), changed))
        return sorted(found, key=lambda entry: entry.name)

    def _bucket_missing(self) -> bool:
        bucket = self.root.split("/")[0]
        return "s3" in _protocols(self.fs) and not self.fs.exists(bucket)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def read(self, name: str) -> bytes:
        try:
            return bytes(self.fs.cat_file(self._path(name)))
        except Exception as err:  # as above: the backend's own kinds
            raise StoreError(f"store {self.url}: cannot read {name}: {err}") from err

    def lines(self, name: str) -> Iterator[bytes]:
        yield from io.BytesIO(self.read(name))  # by \\n alone, as a file is read

    def exists(self, name: str) -> bool:
        """Whether the object exists."""
        try:
            return bool(self.fs.exists(self._path(name)))
        except Exception as err:  # as above
            raise StoreError(f"store {self.url}: cannot reach it: {err}") from err

    def replace(self, name: str, content: bytes) -> None:
        try:
            self.fs.pipe_file(self._path(name), content)
        except Exception as err:  # as above
            raise StoreError(f"store {self.url}: cannot write {name}: {err}") from err

    def adopt(self, path: Path, name: str) -> None:
        try:
            self.fs.put_file(str(path), self._path(name))
        except Exception as err:  # as above
            raise StoreError(f"store {self.url}: cannot write {name}: {err}") from err
        path.unlink()

    def open(self, name: str) -> Any:
        try:
            return self.fs.open(self._path(name), "rb")
        except Exception as err:  # as above
            raise StoreError(f"store {self.url}: cannot read {name}: {err}") from err

    def remove(self, name: str) -> None:
        try:
            self.fs.rm_file(self._path(name))
        except FileNotFoundError:
            return
        except Exception as err:  # as above
            raise StoreError(f"store {self.url}: cannot remove {name}: {err}") from err


def _sync_folder(path: Path) -> None:
    """Make a rename durable before what it replaces is removed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _protocols(fs: Any) -> tuple[str, ...]:
    protocol = fs.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def open_folder(url: str | Path) -> LocalFolder | RemoteFolder:
    """The folder behind a path or a URL; ``file://`` and plain paths need the standard library alone.

    Raises:
        StoreError: the URL's kind is unknown, or what it needs is not installed.
    """
    text = str(url)
    if not text.strip():
        raise StoreError("store: the URL is empty; give a folder or s3://bucket/prefix")
    if text.startswith("file://"):
        return LocalFolder(text.removeprefix("file://"))
    if "://" in text:
        return RemoteFolder(text)
    return LocalFolder(text)
