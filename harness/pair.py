"""The declared pair: the form that every technique has, whatever it computes.

A pair names its claim, makes its inputs, and lists its variants. Three kinds share the form:

* ``op``: a callable on tensors. A variant is a plain function ``fn(**inputs)`` that returns a tensor or a mapping of
  names to tensors; :mod:`harness.opcase` makes the case, and forward, backward and both come from the workload.
* ``step``: a training or decode step on N ranks. A variant is ``build(workload, ctx) -> Case``.
* ``serve``: an engine fed with a request trace. A variant is ``build(workload, ctx) -> Case`` whose ``timeline()``
  gives the events of every request.

This module imports no torch when it is loaded, so that a laptop can list the pairs of a machine it does not have.
What ``pairbench list`` shows (name, kind, layer, relieves, claim, variants and what they require) must be written as
literals inside ``Pair(...)``: :mod:`harness.discover` reads them from the source without importing it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from harness.errors import UsageError
from harness.workload import Workload

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Kind = Literal["op", "step", "serve"]
Layer = Literal["kernel", "graph", "system"]
Moves = Literal["lower", "higher", "same", ""]
Relieves = Literal["memory", "compute", "link", "launch", "capacity"]
Peer = Literal["", "torch", "library"]

KINDS = ("op", "step", "serve")
LAYERS = ("kernel", "graph", "system")
LIMITS = ("memory", "compute", "link", "launch", "capacity")


@dataclass(frozen=True)
class Claim:
    """What the technique promises, and at what cost; an empty field promises nothing."""

    latency: Moves = ""
    throughput: Moves = ""
    memory: Moves = ""
    communication: Moves = ""
    cost: str = ""


@dataclass(frozen=True)
class Work:
    """What the mathematics needs, whoever computes it.

    flops: model FLOPs (causal attention counted as half, recomputation not counted).
    bytes: the least bytes through device memory: each input read once, each output written once.
    link_bytes: bytes that the busiest rank sends over the link. messages: the fewest in which they can travel where
        each waits for the one before; each pays the link's latency. collective: which kind they are, or are mostly.
    launches: kernels that must follow one another even in the best implementation.
    items, unit: what throughput counts (``tokens``, ``rows``, ``requests``).
    reasons: how each figure was counted, by field name.
    """

    flops: float = 0.0
    bytes: float = 0.0
    link_bytes: float = 0.0
    launches: int = 1
    items: float = 1.0
    unit: str = "calls"
    messages: int = 1
    collective: str = "all_reduce"
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tolerance:
    """How a variant's result is judged against the oracle (design: "Being right").

    rule:
      ``same_precision``  error at most max(2 × the baseline's own error, u × the oracle's largest magnitude), as root
                          mean square and in the largest element; u belongs to the workload's dtype. Sums over many
                          terms have a floor of their own (:func:`harness.check.sum_floor`).
      ``exact``           equal to the bit (what only moves data).
      ``lossy``           relative error in norm at most ``bound``.
      ``ranks``           relative norm per tensor at most 1e-5 in float32, 1e-12 in float64, against one process.
      ``tokens``          the very tokens of the oracle, request by request (float32); in lower precision the case
                          scores its own tokens and returns ``logit_gap`` and ``logit_bound`` beside them.
    bound: for ``lossy``, or a wider bound for ``ranks`` with its ``reason``.
    """

    rule: Literal["same_precision", "exact", "lossy", "ranks", "tokens"] = "same_precision"
    bound: float | None = None
    reason: str = ""


@dataclass
class Context:
    """Where and with what a case is built. One per process; a world of one when alone."""

    device: torch.device
    dtype: torch.dtype
    seed: int
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None
    model_path: str | None = None
    trace_path: str | None = None

    def generator(self, salt: int = 0) -> torch.Generator:
        """A fresh CPU generator of this context's seed: the same numbers on every device and every rank."""
        import torch

        return torch.Generator().manual_seed(self.seed * 1_000_003 + salt)

    def randn(self, *shape: int, scale: float = 1.0, salt: int = 0) -> torch.Tensor:
        """Seeded normal numbers on the device, in the workload's dtype; large ones are drawn on the device."""
        import torch

        count = 1
        for size in shape:
            count *= size
        if self.device.type == "cpu" or count < 1 << 22:
            drawn = torch.randn(shape, generator=self.generator(salt), dtype=torch.float32)
            return (drawn * scale).to(device=self.device, dtype=self.dtype)
        on_device = torch.Generator(device=self.device).manual_seed(self.seed * 1_000_003 + salt)
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0, scale, generator=on_device)


class Inputs(dict[str, Any]):
    """Everything that varies, by name, and the seed it was drawn from (gradients of outputs are drawn from it)."""

    def __init__(self, values: Mapping[str, Any], seed: int) -> None:
        super().__init__(values)
        self.seed = seed


@runtime_checkable
class Case(Protocol):
    """One variant, built for one workload.

    ``load`` copies the inputs into the case's own buffers and may be called again; it is not timed. ``run`` is what is
    timed and returns nothing. ``result`` is not timed, may communicate, and gives a flat mapping of names to tensors
    in the global view, or for serve runs the tokens of each request. Optional: ``counters() -> Mapping[str, float]``,
    ``timeline() -> Mapping[str, Any]`` (serve), ``close()``, ``poison()`` (overwrites the outputs that the next run
    must write).
    """

    def load(self, inputs: Inputs) -> None: ...

    def run(self) -> None: ...

    def result(self) -> Mapping[str, Any]: ...


Build = Callable[[Workload, Context], Case]


@dataclass(frozen=True)
class Variant:
    """One implementation.

    fn: for an op the plain function; for a step or serve run ``build(workload, ctx)``. An op may also give ``build``
        (with ``builds=True``) when it needs set-up of its own.
    peer: ``torch`` when one line of torch gives it (the variant that decides whether the technique pays), ``library``
        for a named library, empty for our own.
    requires: what must be there, as literals: ``cuda``, ``triton``, ``compiler``, ``package:NAME``, ``capability:9.0``
        (exactly that major.minor), ``capability>=9.0``, ``ranks>=2``, ``torch>=2.12``.
    supports: why this workload cannot be run, or None: a reason that becomes ``skipped``.
    compiled: the harness wraps ``fn`` in ``torch.compile`` (ops).
    exclusive: it cannot live beside the others in memory; it alternates with them in blocks.
    changes: names of inputs that it overwrites.
    compute_dtype: the dtype that its arithmetic really uses, when it is not the workload's (MFU uses it).
    """

    fn: Callable[..., Any]
    peer: Peer = ""
    requires: tuple[str, ...] = ()
    supports: Callable[[Workload], str | None] | None = None
    compiled: bool = False
    builds: bool = False
    exclusive: bool = False
    changes: tuple[str, ...] = ()
    compute_dtype: str | None = None


@dataclass(frozen=True)
class Pair:
    """A technique: the plain way, the fast way, and what both must agree on.

    inputs: ``(workload, ctx) -> mapping``; tensors, initial weights, requests; drawn from ``ctx.seed``.
    oracle: for an op the same function on float64 inputs; for a step or serve run ``build(workload, ctx) -> Case`` of
        the slower trusted path on a world of one.
    work: ``workload -> Work``.
    predict: ``workload -> speedup of optimized over baseline`` by the count in the docstring, or None for no figure.
    differentiable: for an op, the inputs whose gradients are checked and timed; None means every floating tensor.
    check_runs: how many times ``run`` is called before a step's result is checked.
    shared: ``(workload, ctx) -> modules`` that all variants read and none makes for itself, where they are not among
        the inputs; they are loaded before any variant, and count in the absolute memory of each.
    """

    name: str
    layer: Layer
    relieves: Relieves
    claim: Claim
    inputs: Callable[[Workload, Context], Mapping[str, Any]]
    oracle: Callable[..., Any]
    variants: Mapping[str, Callable[..., Any] | Variant]
    work: Callable[[Workload], Work]
    kind: Kind = "op"
    tolerance: Tolerance = field(default_factory=Tolerance)
    predict: Callable[[Workload], float | None] | None = None
    differentiable: tuple[str, ...] | None = None
    check_runs: int = 1
    shared: Callable[[Workload, Context], Sequence[Any]] | None = None

    def __post_init__(self) -> None:
        problems = []
        if self.kind not in KINDS:
            problems.append(f"kind {self.kind!r} is none of {KINDS}")
        if self.layer not in LAYERS:
            problems.append(f"layer {self.layer!r} is none of {LAYERS}")
        if self.relieves not in LIMITS:
            problems.append(f"relieves {self.relieves!r} is none of {LIMITS}")
        missing = [name for name in ("baseline", "optimized") if name not in self.variants]
        if missing:
            problems.append(f"variants lack {' and '.join(missing)}")
        if problems:
            raise UsageError(f"pair {self.name!r}: {'; '.join(problems)}")

    def variant(self, name: str) -> Variant:
        """The variant of that name; a plain function stands for a variant with nothing declared."""
        found = self.variants[name]
        return found if isinstance(found, Variant) else Variant(found)
