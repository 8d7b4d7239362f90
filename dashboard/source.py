"""The history behind the pages: opened once a process, followed by its stores' fingerprint, judged in the background.

Nothing here imports Streamlit, so that the snapshot and the tests use it as the pages do.
"""

from __future__ import annotations

import atexit
import shlex
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from dashboard.judging import Helper
from harness.errors import PairbenchError
from harness.history.engine import History
from harness.history.order import find_order_repository
from harness.history.query import SeriesKey
from harness.history.store import Store, checkout_store, default_store, stores_to_read
from harness.regress.acknowledge import find_acknowledged
from harness.regress.verdicts import Verdict, judge_within

T = TypeVar("T")
#: Seconds of judging before what was judged is shown: at first, and later, when each showing costs more.
FIRST_SLICE_S: Final = 4.0
SLICE_S: Final = 20.0
#: Pairs of technique and GPU type to go from which on a process of its own judges them.
APART: Final = 8
#: The longest that judging waits, between two groups of series, for a page that is being drawn.
YIELD_S: Final = 1.5
#: Answers to one filter each that are kept; some hold thousands of points.
KEPT: Final = 24


@dataclass
class Judged:
    """The verdicts so far. ``waiting`` counts pairs of technique and GPU type to go; ``problem`` why none can be."""

    state: str = ""
    verdicts: list[Verdict] = field(default_factory=list)
    waiting: int = 0
    problem: str | None = None
    running: bool = False
    _by_series: dict[SeriesKey, Verdict] | None = field(default=None, init=False, repr=False, compare=False)

    def of(self, key: SeriesKey) -> Verdict | None:
        """The verdict on a series; a history of many has tens of thousands."""
        if self._by_series is None:
            self._by_series = {verdict.key: verdict for verdict in self.verdicts}
        return self._by_series.get(key)

    @property
    def whole(self) -> bool:
        """Whether everything is judged."""
        return not self.running and self.waiting == 0


class Source:
    """What the pages read: a :class:`History` that follows its stores, and the verdicts on it.

    Args:
        store: folder or URL; None: the user's own history and the checkout's.
        branch: whose line of commits is looked at.
    """

    def __init__(self, store: str | None = None, branch: str = "HEAD") -> None:
        self.store, self.branch = store, branch
        self.history: History | None = None
        self.problem: str | None = None
        #: The stores' fingerprint before they were read last: when it differs, there is something new.
        self.state = ""
        self.judged = Judged()
        self._lock = threading.Lock()
        self._drawing = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._recent: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def close(self) -> None:
        """End judging, and let go of the history."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout=10)
        if self.history is not None:
            self.history.close()

    def urls(self) -> list[str]:
        """The stores that are read, or would be."""
        if self.history is not None:
            return [store.url for store in self.history.stores]
        return [self.store or "your own history and the checkout's"]

    def names(self) -> list[str]:
        """The stores as a person calls them: no path that tells of the machine."""
        return [store_name(url) for url in self.urls()]

    def over(self, command: str) -> tuple[str, str]:
        """A command of ``pairbench`` over what is read here, which without ``--store`` is what the dashboard reads when
        it is told nothing: as it is shown, with no path that tells of the machine, and as it runs anywhere on it."""
        if self.store is None:
            return command, command
        name = store_name(self.store)
        whole = name if "://" in self.store else str(Path(self.store).resolve())
        return f"{command} --store {shlex.quote(name)}", f"{command} --store {shlex.quote(whole)}"

    def refresh(self) -> None:
        """Take in what is new. What goes wrong stands in ``problem``; what was read before is then shown on."""
        with self._lock:
            try:
                if self.history is None:
                    stores: list[Store] = stores_to_read(self.store)
                    self.history = History(stores, find_order_repository(), self.branch)
                now = self.history.state()
                if now != self.state:
                    self.history.refresh()
                    self.state = now
                self.problem = None
            except PairbenchError as err:
                self.problem = str(err)

    def is_new(self) -> bool:
        """Whether the stores hold something that was not read yet."""
        try:
            return self.history is not None and self.history.state() != self.state
        except PairbenchError:
            return False  # the next refresh says what is wrong

    def once(self, name: str, compute: Callable[[History], T]) -> T:
        """An answer, kept until the history changes."""
        if self.history is None:
            raise PairbenchError(self.problem or "the history is not open")
        return self.history.once(f"dashboard {name}", compute)

    def recent(self, name: str, compute: Callable[[History], T]) -> T:
        """An answer that there are many of, as one a filter: the last few are kept until the history changes."""
        if self.history is None:
            raise PairbenchError(self.problem or "the history is not open")
        key = (self.state, name)
        with self._lock:
            if key in self._recent:
                self._recent.move_to_end(key)
                found: T = self._recent[key]
                return found
        found = compute(self.history)
        with self._lock:
            self._recent[key] = found
            while len(self._recent) > KEPT:
                self._recent.popitem(last=False)
        return found

    def drawing(self) -> _Drawing:
        """A context in which a page is drawn: judging waits for it."""
        return _Drawing(self)

    def judge(self, apart: bool = True) -> Judged:
        """The verdicts so far; judging goes on in the background until there are all. ``apart``: in a process of its
        own where there is much to judge, so that pages are drawn meanwhile as fast as ever."""
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            fresh = self.judged.state == self.state
            if self.history is not None and not busy and not (fresh and self.judged.whole):
                if not fresh:
                    self.judged = Judged(self.state, self.judged.verdicts, 0, None, True)
                self._thread = threading.Thread(target=self._judge, args=(self.history, self.state, apart), daemon=True)
                self._thread.start()
            return self.judged

    def judge_now(self) -> Judged:
        """All verdicts, waited for."""
        while True:
            found = self.judge(apart=False)
            if found.whole or self.history is None:
                return found
            time.sleep(0.05)

    def _judge(self, history: History, state: str, apart: bool) -> None:
        import duckdb

        helper: Helper | None = None
        slice_s = FIRST_SLICE_S
        try:
            self._pause(0, 0)
            while True:
                try:
                    # With nothing to spend, what is kept already is given, and what waits is counted.
                    found = self._judge_slice(history, state, 0.0 if apart else slice_s)
                except duckdb.Error:
                    if self._stop.is_set():  # the history was closed under a query
                        return
                    raise
                self.judged = found
                if not found.running or self.state != state:
                    return
                if apart and helper is None:
                    if found.waiting < APART:
                        apart = False
                        continue
                    helper = Helper(self.store, self.branch)
                apart = helper is not None and not self._ended(helper, slice_s)
                slice_s = SLICE_S
        except _Stopped:
            return
        finally:
            if helper is not None:
                helper.close()

    def _judge_slice(self, history: History, state: str, budget_s: float) -> Judged:
        try:
            repository = history.repository.top if history.repository is not None else None
            verdicts, waiting = judge_within(budget_s, history, None, find_acknowledged(repository), self._pause)
            return Judged(state, verdicts, waiting, None, waiting > 0)
        except PairbenchError as err:
            return Judged(state, [], 0, str(err), False)
        except ModuleNotFoundError as err:
            return Judged(state, [], 0, f"verdicts need {err.name}: pip install 'pairbench[history]'", False)

    def _ended(self, helper: Helper, seconds: float) -> bool:
        """Whether the helper has ended, waited for so long at most; what it left is then judged here."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._stop.is_set():
                raise _Stopped
            if helper.wait(0.25):
                return True
        return False

    def _pause(self, done: int, total: int) -> None:
        """Between two groups of series: a page that is being drawn goes first."""
        if self._stop.is_set():
            raise _Stopped
        until = time.monotonic() + YIELD_S
        while self._drawing and time.monotonic() < until:
            time.sleep(0.02)


class _Stopped(Exception):
    """Judging is no longer wanted."""


class _Drawing:
    def __init__(self, source: Source) -> None:
        self._source = source

    def __enter__(self) -> None:
        self._source._drawing += 1

    def __exit__(self, *_: object) -> None:
        self._source._drawing -= 1


def store_name(url: str) -> str:
    """A store in few words: the user's own, a place in the checkout, else the last folder; a URL as it is, without
    what it signs in with."""
    if "://" in url:
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
    folder = Path(url).resolve()
    checkout = checkout_store()
    if folder == default_store().resolve():
        return "your own history"
    if checkout is not None and folder.is_relative_to(top := checkout.resolve().parents[1]):
        return folder.relative_to(top).as_posix() if folder != top else top.name
    return folder.name or url


_SOURCES: dict[tuple[str | None, str], Source] = {}
_SOURCES_LOCK = threading.Lock()


def open_source(store: str | None, branch: str = "HEAD") -> Source:
    """The source of a store, shared by everybody who looks at it in this process, and refreshed."""
    with _SOURCES_LOCK:
        source = _SOURCES.setdefault((store, branch), Source(store, branch))
    source.refresh()
    return source


def close_sources() -> None:
    """Forget all of them."""
    with _SOURCES_LOCK:
        for source in _SOURCES.values():
            source.close()
        _SOURCES.clear()


# A thread that is inside DuckDB or NumPy when the interpreter goes would take the process down with a message.
atexit.register(close_sources)
