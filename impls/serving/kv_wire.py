"""A link between ranks: messages and blocks over a process group of the two.

Each end has two threads, one that writes what it is given to write and one that reads: the engine's own thread never
waits for a peer. A message is five whole numbers in host memory (over gloo); blocks follow theirs in pieces through two
buffers, the next one gathered while the last is on its way (over NCCL where the caches are on GPUs, on a stream of
their own, so that no step waits for them either).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impls.serving.kv_link import Arrived, Closed, Event, Offered, Pieces, Withdrawn
from impls.serving.to_device import to_device

#: Bytes of a buffer; there are two at each end. A layer of the longest prompt fits in any case.
BUFFER = 32 << 20
#: Kinds of a message. Its other numbers are the request's, and of blocks the first token, when that was there (ns),
#: and how many they are.
OFFER, WITHDRAW, BLOCKS, GRANT, CLOSE = range(5)
NUMBERS = 5


class Wire:
    """One end: its threads, its buffers, and the bytes and seconds of the blocks that passed.

    kv: this side's cache. longest: blocks of the longest prompt. group: of this rank and ``peer`` alone, which is a
    global rank. wake: set whenever there is something to poll.

    Raises:
        ValueError: the cache is on a GPU and the group cannot send from there.
    """

    def __init__(self, kv: Tensor, longest: int, group: Any, peer: int, wake: threading.Event) -> None:
        on_gpu = kv.device.type == "cuda"
        if on_gpu and "nccl" not in dist.get_backend_config(group):
            raise ValueError("gloo sends no CUDA tensors from rank to rank: give each rank a GPU of its own (NCCL)")
        self.group, self.peer, self.wake = group, peer, wake
        self.pieces = Pieces(kv, BUFFER)
        size = max(BUFFER, self.pieces.layer_bytes(longest))
        size = min(size, self.pieces.layer_bytes(longest) * kv.shape[0])
        self.buffers = [torch.empty(size, dtype=torch.uint8, device=kv.device) for _ in range(2)]
        self.device = kv.device
        self.stream = torch.cuda.Stream(kv.device) if on_gpu else None
        self.bytes = 0
        self.seconds = 0.0
        self._outbox: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        self._inbox: deque[Any] = deque()
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []

    def greet(self) -> None:
        """Sends a first piece, or receives it: connections are made when they are first used. Both ends call it."""
        part = self.buffers[0][:1]
        operation = dist.isend if isinstance(self, WireSender) else dist.irecv
        _wait(self._post(operation, part))
        if self.stream is not None:
            torch.cuda.synchronize(self.device)

    def begin(self) -> None:
        """Starts a run: counts from zero, and listens."""
        self.bytes, self.seconds = 0, 0.0
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), daemon=True) for body in (self._write, self._read)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Waits until both sides have said that the run is over."""
        for thread in self._threads:
            thread.join()
        self._look()

    def finish(self) -> None:
        """Says that nothing more comes from this side in this run."""
        self._outbox.put((CLOSE, 0, 0, 0, 0))
        self._outbox.put(None)

    # -- in the threads ------------------------------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            if self.stream is not None:
                torch.cuda.set_device(self.device)
            with torch.inference_mode():
                body()
        except BaseException as err:
            self._failure = err
            self._outbox.put(None)  # the other thread has nothing more to do
            self.wake.set()

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            dist.send(torch.tensor(message, dtype=torch.int64), self.peer, group=self.group)
            if message[0] == BLOCKS:
                self._send(message[1])

    def _read(self) -> None:
        message = torch.empty(NUMBERS, dtype=torch.int64)
        while True:
            dist.recv(message, self.peer, group=self.group)
            kind, number, *more = message.tolist()
            self._hear(kind, number, *more)
            self.wake.set()
            if kind == CLOSE:
                return

    def _hear(self, kind: int, number: int, token: int, ready: int, count: int) -> None:
        raise NotImplementedError

    def _send(self, number: int) -> None:
        raise NotImplementedError

    def _post(self, operation: Any, part: Tensor) -> list[Any]:
        """Starts sending or receiving a piece; what it returns is waited for."""
        return list(dist.batch_isend_irecv([dist.P2POp(operation, part, self.peer, self.group)]))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU everything inside is queued on the wire's own stream, and has been carried out at the end."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
            carried_out = torch.cuda.Event(blocking=True)
            carried_out.record()
        carried_out.synchronize()

    # -- in the engine's thread ----------------------------------------------------------------------------------------

    def _look(self) -> list[Any]:
        if self._failure is not None:
            raise RuntimeError(f"the link to rank {self.peer} broke: {self._failure}") from self._failure
        return [self._inbox.popleft() for _ in range(len(self._inbox))]


class WireSender(Wire):
    """The prefill side's end; see :class:`impls.serving.kv_link.Sender`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offered: dict[int, list[int]] = {}
        self._ready: dict[int, tuple[int, int]] = {}
        self._granted: set[int] = set()
        self._leaving: dict[int, list[int]] = {}
        self._lock = threading.Lock()

    def offer(self, number: int, blocks: Items[int]) -> None:
        """Asks for room."""
        with self._lock:
            self._offered[number] = list(blocks)
        self._outbox.put((OFFER, number, 0, 0, 0))

    def ready(self, number: int, token: int) -> None:
        """The token has come back from the device, so its prompt's keys and values are written."""
        with self._lock:
            self._ready[number] = (token, time.perf_counter_ns())
            self._leave(number)

    def withdraw(self, number: int) -> bool:
        """Told behind the blocks where those are leaving."""
        with self._lock:
            held = self._offered.pop(number, None)
            self._ready.pop(number, None)
            self._granted.discard(number)
            self._outbox.put((WITHDRAW, number, 0, 0, 0))
        return held is not None

    def poll(self) -> list[int]:
        """Requests whose blocks have been read."""
        return self._look()

    def _hear(self, kind: int, number: int, token: int, ready: int, count: int) -> None:
        if kind == GRANT:
            with self._lock:
                if number in self._offered:
                    self._granted.add(number)
                    self._leave(number)

    def _leave(self, number: int) -> None:
        """Sets blocks on their way that are ready and have room; the caller holds the lock."""
        if number in self._granted and number in self._ready:
            self._granted.remove(number)
            blocks = self._leaving[number] = self._offered.pop(number)
            self._outbox.put((BLOCKS, number, *self._ready.pop(number), len(blocks)))

    def _send(self, number: int) -> None:
        blocks = self._leaving.pop(number)
        with self._aside():
            index = to_device(torch.tensor(blocks), self.device)
            under_way: list[list[Any]] = [[], []]
            for turn, layers in enumerate(self.pieces.ranges(len(blocks))):
                buffer, works = self.buffers[turn % 2], under_way[turn % 2]
                _wait(works)
                piece = self.pieces.view(buffer, layers, len(blocks))
                self.pieces.gather(piece, layers, index)
                under_way[turn % 2] = self._post(dist.isend, buffer[: piece.nbytes])
                self.bytes += piece.nbytes
            for works in under_way:
                _wait(works)
        self._inbox.append(number)
        self.wake.set()


class WireReceiver(Wire):
    """The decode side's end; see :class:`impls.serving.kv_link.Receiver`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._targets: dict[int, tuple[list[int], float, Any]] = {}

    def poll(self) -> list[Event]:
        """What came, in order."""
        return self._look()

    def grant(self, number: int, blocks: Items[int]) -> None:
        """What was launched until now may still read or write these blocks for whoever held them before."""
        launched = None
        if self.stream is not None:
            launched = torch.cuda.Event()
            launched.record()
        self._targets[number] = (list(blocks), time.perf_counter(), launched)
        self._outbox.put((GRANT, number, 0, 0, 0))

    def _hear(self, kind: int, number: int, token: int, ready: int, count: int) -> None:
        if kind == OFFER:
            self._inbox.append(Offered(number))
        elif kind == BLOCKS:
            granted = self._receive(number, count)
            since = ready * 1e-9
            self._inbox.append(Arrived(number, token, since, time.perf_counter() - max(since, granted)))
        elif kind == WITHDRAW:
            self._targets.pop(number, None)
            self._inbox.append(Withdrawn(number))
        elif kind == CLOSE:
            self._inbox.append(Closed())

    def _receive(self, number: int, count: int) -> float:
        """Takes the blocks in; when room was granted for them (s)."""
        began = time.perf_counter()
        blocks, granted, launched = self._targets.pop(number)
        if count != len(blocks):
            raise ValueError(f"request {number} comes in {count} blocks, and has {len(blocks)} here")
        with self._aside():
            if self.stream is not None:
                self.stream.wait_event(launched)
            index = to_device(torch.tensor(blocks), self.device)
            coming: tuple[list[Any], Tensor, tuple[int, int]] | None = None
            for turn, layers in enumerate(self.pieces.ranges(count)):
                piece = self.pieces.view(self.buffers[turn % 2], layers, count)
                works = self._post(dist.irecv, self.buffers[turn % 2][: piece.nbytes])
                if coming is not None:
                    self._put(*coming, index)
                coming = (works, piece, layers)
                self.bytes += piece.nbytes
            if coming is not None:
                self._put(*coming, index)
        self.seconds += time.perf_counter() - began
        return granted

    def _put(self, works: list[Any], piece: Tensor, layers: tuple[int, int], index: Tensor) -> None:
        _wait(works)
        self.pieces.scatter(piece, layers, index)


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
