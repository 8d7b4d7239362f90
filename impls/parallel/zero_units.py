"""Parameters side by side in units that every rank owns an equal part of: what ZeRO shards, gathers and scatters, and
how many bytes that is.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5 (what each
stage shards) and section 7 (what travels). A unit is a bucket of parameters in stages 1 and 2, a layer in stage 3.
"""

# Shapes: P numbers of a unit, padded to N·n over N ranks; a rank owns n of them.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.workload import Workload
from impls.model.config import ModelConfig
from impls.model.decoder import Decoder
from impls.parallel import shared
from impls.parallel.buckets import wide
from impls.parallel.link import Handle, Link, gather_rows
from impls.parallel.shared import ITEMSIZE, ring_bytes, wide_size


def by_bucket(sizes: Mapping[str, int], capacity: int) -> list[list[str]]:
    """Names in buckets of at most ``capacity`` numbers (a larger parameter has one of its own), the last first: about
    the order in which backward makes gradients."""
    groups: list[list[str]] = [[]]
    size = 0
    for name in reversed(list(sizes)):
        if groups[-1] and size + sizes[name] > capacity:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += sizes[name]
    return groups


def by_layer(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names of the embedding, of each layer, and of what comes after the last; in the order of forward."""
    groups: dict[str, list[str]] = {}
    for name in sizes:
        parts = name.split(".")
        place = ".".join(parts[:2]) if parts[0] == "layers" else "embed" if parts[0] == "embed_tokens" else "head"
        groups.setdefault(place, []).append(name)
    return list(groups.values())


def padded(numbers: int, ranks: int) -> int:
    """The least multiple of ``ranks`` that holds them: what a unit of them really sends and keeps."""
    return -(-numbers // ranks) * ranks


def config_of(workload: Workload) -> ModelConfig:
    """The decoder; its embeddings are one tensor where the workload says ``tied``."""
    return replace(shared.model_config(workload), tie_word_embeddings=bool(workload.dims.get("tied", False)))


def meta_decoder(workload: Workload, dtype: torch.dtype) -> Decoder:
    """The model without storage: names, shapes and places."""
    with torch.device("meta"):
        return Decoder(config_of(workload)).to(dtype)


def bucket_bytes(workload: Workload) -> int:
    return max(1, int(workload.bucket_kib * 1024))


def units_of(workload: Workload, variant: str) -> list[list[str]]:
    """The names in each unit of one of our variants; the baseline's one unit is never cut.

    Raises:
        ValueError: a variant that is not ours.
    """
    sizes = {name: param.numel() for name, param in meta_decoder(workload, torch.float32).named_parameters()}
    if variant in ("stage1", "optimized"):
        return by_bucket(sizes, bucket_bytes(workload) // wide_size(workload.dtype))
    if variant == "stage3":
        return by_layer(sizes)
    if variant == "baseline":
        return [list(sizes)]
    raise ValueError(f"the units of {variant!r} are not counted here")


def numbers(workload: Workload, variant: str) -> int:
    """P: all weights, a tied embedding once; where units are cut, each padded so that it divides over the ranks."""
    sizes = {name: param.numel() for name, param in meta_decoder(workload, torch.float32).named_parameters()}
    ranks = 1 if variant == "baseline" else workload.ranks
    return sum(padded(sum(sizes[name] for name in names), ranks) for names in units_of(workload, variant))


def link_bytes(workload: Workload, variant: str) -> float:
    """Bytes that a rank sends in a step of one of our variants, as counted in this module's docstring."""
    size, wide_bytes = ITEMSIZE[workload.dtype], wide_size(workload.dtype)
    gathered = {"baseline": wide_bytes, "stage3": 2 * size}.get(variant, size)
    return ring_bytes(workload.ranks, numbers(workload, variant) * (wide_bytes + gathered))


def state_formula(workload: Workload, variant: str) -> float:
    """Bytes of model states that a rank keeps in one of our variants, as counted in this module's docstring."""
    size, wide_bytes, count = ITEMSIZE[workload.dtype], wide_size(workload.dtype), numbers(workload, variant)
    kept = 2 * wide_bytes + (wide_bytes if size < wide_bytes else 0)
    whole = {"baseline": size + wide_bytes + kept, "stage1": size + wide_bytes, "optimized": size, "stage3": 0}[variant]
    return float(count * whole + count // workload.ranks * (size + wide_bytes + kept - whole))


class Unit:
    """Some parameters, their gradients' sums and this rank's part of what the optimizer keeps.

    ``params`` are new parameters, views of one flat tensor, which stand where those of ``like`` stood. ``master`` (n)
    is this rank's part in at least float32: the very part of the weights where they are that wide.

    stage: 1 keeps the gradients of all of the unit, 2 only those of the own part once they are summed, 3 keeps no more
        of the weights either: they have storage between :meth:`gather` and :meth:`free` only.
    full: called as soon as backward has made all gradients of the unit.
    """

    def __init__(self, like: Mapping[str, Tensor], link: Link, device: torch.device, stage: int) -> None:
        self.link, self.stage = link, stage
        dtype = next(iter(like.values())).dtype
        self.numbers = sum(x.numel() for x in like.values())
        self.part = padded(self.numbers, link.world) // link.world
        self.flat = torch.zeros(self.part * link.world, dtype=dtype, device=device)
        self.shapes = {name: x.shape for name, x in like.items()}
        # Through .data, whose versions are counted apart: weights that come anew for backward are those that it saved.
        self.params = {name: nn.Parameter(view) for name, view in self.views(self.flat.data).items()}
        own = self._own(self.flat)
        self.shard = own.clone() if stage == 3 else own
        self.master = self.shard if wide(dtype) == dtype else self.shard.to(wide(dtype))
        self.full: Callable[[Unit], None] | None = None
        self._sums: Tensor | None = None
        self._places: dict[str, Tensor] = {}
        self._waiting_for = set(like)
        self._coming: Handle | None = None
        self._leaving: Handle | None = None
        self._here = True
        for name, param in self.params.items():
            param.register_post_accumulate_grad_hook(self._collector(name))
        self.free()

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Each parameter's place in a flat tensor."""
        parts = flat[: self.numbers].split([shape.numel() for shape in self.shapes.values()])
        return {name: x.view(shape) for (name, shape), x in zip(self.shapes.items(), parts, strict=True)}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take whole weights by name."""
        whole = self.flat if self.stage < 3 else torch.zeros_like(self.flat)
        for name, view in self.views(whole).items():
            view.copy_(weights[name])
        if self.stage == 3:
            self.free()
            self.shard.copy_(self._own(whole))
        self.master.copy_(self.shard)
        self.master.grad = None

    def whole(self, part: Tensor) -> dict[str, Tensor]:
        """All ranks' parts as whole tensors by name. Not counted: for results."""
        flat = gather_rows(self.link, part, [self.part] * self.link.world)
        return {name: view.clone() for name, view in self.views(flat).items()}

    # -- weights -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Let every rank's part come, unless they are here or on their way."""
        if self._here or self._coming is not None:
            return
        if self.stage == 3:
            self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.itemsize)
        # A muted link copies the own part to the others' places, which must not be one memory.
        part = self.shard.clone() if self.link.muted else self.shard
        self._coming = self.link.all_gather(self.flat, part)

    def gather(self) -> None:
        """The weights are here, whole."""
        self.start()
        if self._coming is not None:
            self._coming.wait()
        self._coming, self._here = None, True

    def free(self) -> None:
        """Keep of the weights this rank's part only (stage 3)."""
        if self.stage < 3:
            return
        if self._coming is not None:
            self._coming.wait()
        self._coming, self._here = None, False
        self.flat.untyped_storage().resize_(0)

    def stepped(self) -> None:
        """The own part of the weights is what the optimizer made; the others' are to come."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        self._here = False

    # -- gradients ---------------------------------------------------------------------------------------------------

    def scatter(self) -> None:
        """Start to sum all ranks' gradients, each rank its part."""
        assert self._sums is not None
        grad = self._own(self._sums) if self.stage == 1 else torch.empty_like(self.master)
        self._leaving = self.link.reduce_scatter(grad, self._sums)
        self.master.grad = grad

    def settle(self) -> None:
        """``master.grad`` is summed."""
        if self._leaving is not None:
            self._leaving.wait()
        self._leaving = None
        if self.stage > 1:
            self._sums, self._places = None, {}

    def communicate(self) -> None:
        """A step's messages alone, with whatever the unit holds; gradients are lost."""
        self.zero_sums()
        for _ in range(2 if self.stage == 3 else 1):
            self._here = False
            self.gather()
            self.free()
        self.scatter()
        self.settle()
        self.master.grad = None

    def zero_sums(self) -> Tensor:
        """The gradients' flat tensor; what pads it is zero."""
        if self._sums is None:
            self._sums = self.flat.new_empty(self.flat.shape, dtype=self.master.dtype)
            self._places = self.views(self._sums)
        self._sums[self.numbers :].zero_()
        return self._sums

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(param: Tensor) -> None:
            assert param.grad is not None
            if self._sums is None:
                self.zero_sums()
            self._places[name].copy_(param.grad)
            param.grad = None
            self._waiting_for.discard(name)
            if not self._waiting_for:
                self._waiting_for = set(self.params)
                assert self.full is not None
                self.full(self)

        return collect

    def _own(self, flat: Tensor) -> Tensor:
        return flat.narrow(0, self.link.rank * self.part, self.part)


def adopt(model: nn.Module, units: Sequence[Unit]) -> None:
    """Put the units' parameters into the model, tied ones into every place."""
    old = dict(model.named_parameters())
    new = {id(old[name]): param for unit in units for name, param in unit.params.items()}
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is not None:
                setattr(module, key, new[id(param)])


class Travel:
    """Gathers units as forward and backward come to them, one ahead, and frees what was used (section 7.2.2).

    uses: the unit of each use in forward's order, with the first and the last module of the use. A unit whose later
        use ends forward is not freed there, since backward begins with it.
    """

    def __init__(self, uses: Sequence[tuple[Unit, nn.Module, nn.Module]]) -> None:
        self.units = [unit for unit, _, _ in uses]
        for place, (unit, first, last) in enumerate(uses):
            again = place == len(uses) - 1 and unit in self.units[:place]
            first.register_forward_pre_hook(self._before(place))
            last.register_forward_hook(self._after(place, keep=again))

    def come(self, place: int, ahead: int) -> None:
        """The unit of that use is here, the next one on its way."""
        self.units[place].gather()
        if 0 <= place + ahead < len(self.units):
            self.units[place + ahead].start()

    def end(self) -> None:
        """Free whatever is still here or on its way."""
        for unit in self.units:
            unit.free()

    def _before(self, place: int) -> Callable[..., None]:
        return lambda module, args: self.come(place, 1)

    def _after(self, place: int, keep: bool) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            if not keep:
                self.units[place].free()
            to_come = {place}

            def need(grad: Tensor) -> None:
                if to_come:  # the first of the gradients; another may come when the unit is done and gone again
                    self.come(to_come.pop(), -1)

            for x in output if isinstance(output, tuple) else (output,):
                if x.requires_grad:
                    x.register_hook(need)

        return after


def held_bytes(root: object, besides: Iterable[object] = ()) -> int:
    """Bytes of all distinct storages that an object of this package holds: tensors in its attributes, containers,
    modules and optimizers, and their gradients. Of a distributed tensor it is this rank's part. Single numbers (counts
    of steps, losses) and ``besides`` (the inputs) are left out."""
    given = {x.untyped_storage().data_ptr() for x in besides if isinstance(x, Tensor)}
    found = {}
    for x in _tensors(root, set()):
        storage = x.untyped_storage()
        if x.dim() and storage.data_ptr() not in given:
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _tensors(thing: object, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    inner: Iterable[object] = ()
    if isinstance(thing, Tensor):
        yield thing.to_local() if hasattr(thing, "to_local") else thing
        inner = (thing.grad,) if thing.is_leaf else ()
    elif isinstance(thing, nn.Module):
        inner = (*thing.parameters(), *thing.buffers())
    elif isinstance(thing, torch.optim.Optimizer):
        inner = (thing.param_groups, thing.state)
    elif isinstance(thing, Mapping):
        inner = (*thing.keys(), *thing.values())
    elif isinstance(thing, list | tuple | set | deque):
        inner = tuple(thing)
    elif type(thing).__module__.startswith("impls."):
        inner = vars(thing).values()
    for one in inner:
        yield from _tensors(one, seen)
