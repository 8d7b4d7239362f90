"""Runs a warp-specialized Gluon kernel on the CPU: each partition is a thread, each barrier a real one.

Gluon has no interpreter, so this stands in for the part of the language that the attention kernel uses. It is strict
where the hardware is: an asynchronous product reads its operands as late as it may (when somebody waits for it), and a
bulk copy out of shared memory its source, so that a slot freed too early gives wrong numbers; a bulk copy that overruns
its barrier's expected bytes, and a wait that nobody ends, raise. With LATE a bulk copy into shared memory lands only
when somebody waits for it, so that a wait left out gives wrong numbers; at once, a slot filled too early does. PAUSE_S
after an arrival lets others go first, who then write where the one that arrived too early still reads.
"""

from __future__ import annotations

import operator
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch

WAIT_S = 20.0
LATE = False  # whether bulk copies into shared memory land when somebody waits for them, instead of at once
PAUSE_S = 0.0


class Scalar(int):
    """A run-time integer: Gluon's, with `.to`."""

    def to(self, dtype: Any) -> Scalar:
        return self


def _wrap(name: str) -> Callable[..., Any]:
    def apply(self: Scalar, other: Any) -> Any:
        result = getattr(int, name)(self, other)
        return Scalar(result) if isinstance(result, int) else result

    return apply


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "and", "xor", "rand", "rxor"):
    setattr(Scalar, f"__{_name}__", _wrap(f"__{_name}__"))


class Barrier:
    """An mbarrier: a phase ends when its arrivals and its expected bytes are all in."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.count = self.pending = self.bytes = self.phase = 0
        self.landing: list[Callable[[], Any]] = []

    def change(self, arrivals: int, expected: int) -> None:
        with self.condition:
            self.pending -= arrivals
            self.bytes += expected
            assert self.pending >= 0, "more arrivals than the barrier counts"
            if self.pending == 0 and self.bytes == 0:
                self.phase ^= 1
                self.pending = self.count
                self.condition.notify_all()

    def wait(self, parity: int) -> None:
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase != parity, WAIT_S):
                raise TimeoutError("a barrier that nobody completes: deadlock")
            while self.landing:
                self.landing.pop(0)()


class Shared:
    """A shared-memory descriptor over a tensor's storage."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.dtype = data.dtype
        self.type = types.SimpleNamespace(shape=list(data.shape))

    def index(self, i: int) -> Any:
        return Shared(self.data[int(i)])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def load(self, layout: Any) -> torch.Tensor:
        return self.data.clone()

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.data.view(-1).view(dtype)[: torch.Size(shape).numel()].view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: torch.Tensor) -> None:
        self.data.copy_(value)


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: int) -> Barrier:
        return self.all[int(i)]


class Descriptor:
    """A tensor descriptor: a view in the kernel's order of dimensions, and the block that one copy moves."""

    def __init__(self, view: torch.Tensor, block: list[int]) -> None:
        self.view, self.dtype, self.layout = view, view.dtype, None
        nbytes = torch.Size(block).numel() * view.element_size()
        self.block_type = types.SimpleNamespace(shape=block, nbytes=nbytes)

    def part(self, coord: list[int]) -> torch.Tensor:
        """The block at `coord`, cut off where the tensor ends."""
        part = self.view
        for dim, (start, size) in enumerate(zip(coord, self.block_type.shape, strict=True)):
            assert start >= 0, "the copy engine clips below zero too, but these kernels never ask it to"
            first = min(int(start), part.shape[dim])
            part = part.narrow(dim, first, min(size, part.shape[dim] - first))
        return part


def heads_first(tensor: torch.Tensor, rows: int) -> Descriptor:
    """A [B, S, H, D] tensor as the kernels see it: batch, head, row, column."""
    return Descriptor(tensor.permute(0, 2, 1, 3), [1, 1, rows, tensor.shape[-1]])


class Token:
    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self.compute, self.value = compute, torch.empty(0)


_local = threading.local()
_adding = threading.Lock()


def _in_flight() -> list[Token]:
    if not hasattr(_local, "tokens"):
        _local.tokens = []
    tokens: list[Token] = _local.tokens
    return tokens


def _operand(value: Any) -> torch.Tensor:
    return (value.data if isinstance(value, Shared) else value).float()


def warpgroup_mma(a: Any, b: Any, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Token:
    assert is_async, "the kernel has no synchronous product"

    def compute() -> torch.Tensor:
        before: torch.Tensor | float = acc.value if isinstance(acc, Token) else acc  # in order: it has been computed
        return _operand(a) @ _operand(b) + (before if use_acc else 0.0)

    token = Token(compute)
    _in_flight().append(token)
    return token


def warpgroup_mma_wait(num_outstanding: int, deps: list[Any]) -> Any:
    tokens = _in_flight()
    while len(tokens) > num_outstanding:
        token = tokens.pop(0)
        token.value = token.compute()
    # What is still on its way stays a token, that only a further product may add to.
    results = tuple(dep.value if isinstance(dep, Token) and dep not in tokens else dep for dep in deps)
    return results[0] if len(results) == 1 else results


def _copy_in(desc: Descriptor, coord: list[int], barrier: Barrier, buffer: Shared) -> None:
    source = desc.part(coord)
    block = torch.zeros(desc.block_type.shape, dtype=desc.dtype)
    block[tuple(slice(n) for n in source.shape)] = source
    if LATE:
        barrier.landing.append(lambda: buffer.data.copy_(block))
    else:
        buffer.data.copy_(block)
    assert barrier.bytes >= desc.block_type.nbytes, "more bytes arrive than the barrier expects"
    barrier.change(0, -desc.block_type.nbytes)


def _leaving() -> list[Callable[[], Any]]:
    if not hasattr(_local, "copies"):
        _local.copies = []
    copies: list[Callable[[], Any]] = _local.copies
    return copies


def _copy_out(desc: Descriptor, coord: list[int], buffer: Shared) -> None:
    target = desc.part(coord)
    _leaving().append(lambda: target.copy_(buffer.data[tuple(slice(n) for n in target.shape)]))


def _reduce_add(desc: Descriptor, coord: list[int], buffer: Shared) -> None:
    target = desc.part(coord)

    def add() -> None:
        with _adding:
            target.add_(buffer.data[tuple(slice(n) for n in target.shape)])

    _leaving().append(add)


def _store_wait(outstanding: int) -> None:
    copies = _leaving()
    while len(copies) > outstanding:
        copies.pop(0)()


def _expect(barrier: Barrier, nbytes: int) -> None:
    with barrier.condition:
        barrier.bytes += nbytes
    barrier.change(1, 0)


def _arrive(barrier: Barrier, count: int) -> None:
    barrier.change(count, 0)
    if PAUSE_S:
        time.sleep(PAUSE_S)


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


class Memory:
    """A pointer argument: a flat tensor that offsets are added to."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __add__(self, offset: Any) -> Any:
        return Pointer(self.data, offset)


class Pointer:
    def __init__(self, data: torch.Tensor, offset: Any) -> None:
        self.data, self.offset = data, offset

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.offset + more)

    def unsqueeze(self, axis: int) -> Pointer:
        return Pointer(self.data, self.offset.unsqueeze(axis))


def _load(pointer: Pointer) -> Scalar:
    """A single number; out of bounds is an error."""
    assert 0 <= pointer.offset < pointer.data.numel(), "a load outside of its tensor"
    return Scalar(pointer.data[int(pointer.offset)].item())


def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
    mask = mask.expand_as(value)
    pointer.data[pointer.offset.expand_as(value)[mask]] = value[mask]


def _atomic_add(pointer: Memory, value: int, sem: str = "acq_rel") -> Scalar:
    before = Scalar(pointer.data.item())
    pointer.data += value
    return before


def _either(scalar: Callable[..., Any], tensor: Callable[..., Any]) -> Callable[..., Any]:
    def apply(a: Any, b: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return tensor(a, b if isinstance(b, torch.Tensor) else torch.tensor(b))
        return Scalar(scalar(a, b))

    return apply


def _where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    return torch.where(condition, a, b)


def run_on_threads(kernel: Any, programs: int, args: dict[str, Any]) -> None:
    """Run every program of `kernel`, one after another, with `args` by name."""
    for program in range(programs):
        _run_program(kernel, program, programs, args)


def _run_program(kernel: Any, program: int, programs: int, args: dict[str, Any]) -> None:
    def specialize(functions: list[tuple[Callable[..., Any], tuple[Any, ...]]], *_: Any) -> None:
        failures: list[BaseException] = []

        def guarded(function: Callable[..., Any], values: tuple[Any, ...]) -> None:
            try:
                function(*values)
                assert not _in_flight(), "a product is never waited for"
                assert not _leaving(), "shared memory ends before a copy out of it"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=pair, daemon=True) for pair in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * WAIT_S)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "a partition never ends"

    def shared(dtype: Any, shape: list[int], layout: Any) -> Any:
        if dtype is torch.int64:
            return Barriers(shape[0])
        return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -(10**9), dtype=dtype))

    gl = types.SimpleNamespace(
        program_id=lambda axis: Scalar(program), num_programs=lambda axis: programs, static_range=range,
        cdiv=lambda a, b: Scalar(-(-a // b)), minimum=_either(min, torch.minimum), maximum=_either(max, torch.maximum),
        arange=lambda a, b, layout: torch.arange(a, b), expand_dims=lambda t, axis: t.unsqueeze(axis), where=_where,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        max=lambda t, axis: t.amax(axis), sum=lambda t, axis: t.sum(axis), exp2=torch.exp2, log2=torch.log2,
        convert_layout=lambda t, layout: t, store=_store, load=_load, atomic_add=_atomic_add,
        allocate_shared_memory=shared, warp_specialize=specialize,
        float32=torch.float32, int32=torch.int32, int64=torch.int64, constexpr=operator.index,
        SwizzledSharedLayout=lambda *a: None, BlockedLayout=lambda *a: None,
        SliceLayout=lambda *a: None, NVMMADistributedLayout=lambda *a: None, DotOperandLayout=lambda *a: None,
    )  # fmt: skip
    # Stand-ins by the names under which the kernel's module knows the language; its own functions run as Python.
    scope: dict[str, Any] = {
        "gl": gl, "range": lambda *a: map(Scalar, range(*a)), "warpgroup_mma": warpgroup_mma,
        "warpgroup_mma_wait": warpgroup_mma_wait, "fence_async_shared": lambda: None, "threads_meet": lambda: None,
        "mbarrier": types.SimpleNamespace(
            init=lambda bar, count: _init(bar, count), expect=_expect, wait=lambda bar, parity: bar.wait(parity),
            arrive=lambda bar, count, pred=True: _arrive(bar, count) if pred else None, MBarrierLayout=lambda: None,
        ),
        "tma": types.SimpleNamespace(
            async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_store_wait
        ),
        "async_reduce_add": _reduce_add,
    }  # fmt: skip
    module_globals = kernel.fn.__globals__
    for name, value in module_globals.items():
        if name not in scope and hasattr(value, "fn"):
            function = value.fn
            scope[name] = types.FunctionType(function.__code__, scope, name, function.__defaults__)
    scope["halves"] = lambda values: values.chunk(2, 1)
    scope["settled"] = lambda values: values
    scope["publish"] = lambda buffer, index: buffer.store(torch.tensor([index]))
    scope["published"] = lambda buffer: Scalar(buffer.data.item())
    scope["float"] = float
    scope["hasattr"] = hasattr
    types.FunctionType(kernel.fn.__code__, scope, "kernel", kernel.fn.__defaults__)(**args)
