"""AdamW over all parameters in one launch, with float32 master weights for 16-bit parameters.

    w = w * (1 - lr * decay)                                   decay apart from the gradient
    m = m + (1 - b1) * (g - m)
    v = b2 * v + (1 - b2) * g²
    w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

Bytes through device memory, a parameter:

    plain  eager updates, one tensor at a time: decay (8), m (12), v (8 + 12), square root, division and sum for the
           denominator (8 + 8 + 8), update (16): 80; with 16-bit parameters two casts, gradient and weight (6 + 6): 92
    fused  float32 parameters: read g, w, m, v (16), write w, m, v (12): 28
           16-bit parameters:  read g (2) and master, m, v (12), write master, m, v (12) and the parameter (2): 28

Design. The parameters are cut into chunks of 1,024 elements. A table on the device holds the tensors' addresses,
another each chunk's tensor and number, so one launch serves many small and few large tensors alike; the tables are
made once, and only the gradients' addresses are written again when they change. A thread takes 4 elements: 16 bytes of
each float32 tensor and 8 of the 16-bit ones, in one layout, so nothing passes through shared memory; 48 warps a
multiprocessor keep some 80 KiB of loads in flight and hide the look-ups. Tensors whose addresses are not multiples of
16 bytes, and each combination of dtypes, get a launch of their own. With the step on the device, a small kernel counts
it and makes the bias corrections, so that a captured graph keeps counting.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels._rows import check_beside, check_float, on_device_of

CHUNK = 1024
_WARPS = 8  # 4 elements a thread
_REGISTERS = 40  # 48 warps a multiprocessor
_TL = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    grad_ptr,
    weight_ptr,
    first_ptr,
    second_ptr,
    param_ptr,
    size,
    keep,
    rate,
    root,
    beta1,
    beta2,
    eps,
    HAS_MASTER: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One chunk from its first element. Only the last of a tensor is masked: a mask of any length rules out vectors."""
    offset = tl.arange(0, BLOCK)
    mask = None if WHOLE else offset < size
    grad = tl.load(grad_ptr + offset, mask=mask).to(tl.float32)
    weight = tl.load(weight_ptr + offset, mask=mask)
    first = tl.load(first_ptr + offset, mask=mask)
    second = tl.load(second_ptr + offset, mask=mask)
    first += (1.0 - beta1) * (grad - first)
    second = beta2 * second + (1.0 - beta2) * (grad * grad)
    weight = weight * keep - rate * first / (tl.sqrt(second) * root + eps)
    tl.store(first_ptr + offset, first, mask=mask)
    tl.store(second_ptr + offset, second, mask=mask)
    tl.store(weight_ptr + offset, weight, mask=mask)
    if HAS_MASTER:
        tl.store(param_ptr + offset, weight.to(param_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _adamw_kernel(
    chunk_ptr,
    address_ptr,
    grad_address_ptr,
    correction_ptr,
    keep,
    rate,
    root,
    beta1,
    beta2,
    eps,
    ON_DEVICE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    index = tl.load(chunk_ptr + 2 * chunk)
    start = tl.load(chunk_ptr + 2 * chunk + 1) * BLOCK
    grad_address = tl.load(grad_address_ptr + index)
    if grad_address != 0:  # a parameter without a gradient is left alone, its moments too
        row = address_ptr + 5 * index
        param_ptr = _pointer(tl.load(row), PARAM, ALIGNED) + start
        weight_ptr = param_ptr
        if HAS_MASTER:
            weight_ptr = _pointer(tl.load(row + 1), tl.float32, ALIGNED) + start
        first_ptr = _pointer(tl.load(row + 2), tl.float32, ALIGNED) + start
        second_ptr = _pointer(tl.load(row + 3), tl.float32, ALIGNED) + start
        size = tl.load(row + 4) - start
        grad_ptr = _pointer(grad_address, GRAD, ALIGNED) + start
        if ON_DEVICE:
            rate = rate * tl.load(correction_ptr)
            root = tl.load(correction_ptr + 1)
        if size >= BLOCK:
            _update(
                grad_ptr, weight_ptr, first_ptr, second_ptr, param_ptr, size,
                keep, rate, root, beta1, beta2, eps, HAS_MASTER, True, BLOCK,
            )  # fmt: skip
        else:
            _update(
                grad_ptr, weight_ptr, first_ptr, second_ptr, param_ptr, size,
                keep, rate, root, beta1, beta2, eps, HAS_MASTER, False, BLOCK,
            )  # fmt: skip


@triton.jit
def _count_kernel(step_ptr, correction_ptr, log_beta1, log_beta2):
    """Count one step and make its bias corrections in float64: 1 / (1 - b1^t) and 1 / sqrt(1 - b2^t)."""
    step = tl.load(step_ptr) + 1
    tl.store(step_ptr, step)
    count = step.to(tl.float64)
    first = 1.0 - tl.exp(count * log_beta1)
    second = 1.0 - tl.exp(count * log_beta2)
    tl.store(correction_ptr, (1.0 / first).to(tl.float32))
    tl.store(correction_ptr + 1, (1.0 / tl.sqrt(second)).to(tl.float32))


def bytes_per_parameter(param: torch.dtype, grad: torch.dtype) -> int:
    """What one step moves for each parameter: 28 for float32 alone, and for a 16-bit parameter and gradient."""
    state = 2 * 3 * torch.float32.itemsize
    return grad.itemsize + state + (0 if param == torch.float32 else param.itemsize)


@dataclass
class _Group:
    """Tensors of one combination of dtypes and alignment, and their tables on the device."""

    members: list[int]
    param: torch.dtype
    grad: torch.dtype
    aligned: bool
    chunks: torch.Tensor
    addresses: torch.Tensor
    grad_addresses: torch.Tensor
    known: list[int]


class AdamW:
    """The state of AdamW for a list of parameters, and `step`, which updates all of them in one launch a dtype.

    params        contiguous float32, float16 or bfloat16 tensors of any shapes on one device
    lr, betas, eps, weight_decay   as torch.optim.AdamW; attributes, to be changed between steps
    on_device     count the steps on the device (for captured graphs) instead of on the host
    masters, exp_avgs, exp_avg_sqs   state to go on from, float32 and like params (masters of float32 parameters are
                  not used); None starts afresh

    The state is in the attributes of these names (a master is None for a float32 parameter) and in `steps`. Raises
    ValueError naming the argument that is not supported.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        on_device: bool = False,
        masters: Sequence[torch.Tensor] | None = None,
        exp_avgs: Sequence[torch.Tensor] | None = None,
        exp_avg_sqs: Sequence[torch.Tensor] | None = None,
    ) -> None:
        if not params:
            raise ValueError("params: is empty; there is nothing to update")
        for name, value, sound in (
            ("lr", lr, lr >= 0.0),
            ("betas", betas, all(0.0 <= beta < 1.0 for beta in betas)),
            ("eps", eps, eps >= 0.0),
            ("weight_decay", weight_decay, weight_decay >= 0.0),
        ):
            if not sound:
                raise ValueError(f"{name}: {value} is out of range")
        for index, param in enumerate(params):
            check_float(f"params[{index}]", param)
            if not param.is_contiguous():
                raise ValueError(f"params[{index}]: stride {param.stride()}; it must be contiguous")
            if param.device != params[0].device:
                raise ValueError(f"params[{index}]: is on {param.device}, but params[0] is on {params[0].device}")
        self.params = [param.detach() for param in params]
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        given = [] if masters is None else self._adopted("masters", masters)
        self.masters: list[torch.Tensor | None] = [
            None if param.dtype == torch.float32 else given[index] if given else param.float()
            for index, param in enumerate(self.params)
        ]
        self.exp_avgs, self.exp_avg_sqs = (
            [torch.zeros_like(param, dtype=torch.float32) for param in self.params]
            if moments is None
            else self._adopted(name, moments)
            for name, moments in (("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs))
        )
        device = self.params[0].device
        self._steps = 0
        self._counter = torch.zeros((), dtype=torch.int64, device=device) if on_device else None
        self._corrections = torch.zeros(2, dtype=torch.float32, device=device)
        self._groups: list[_Group] = []
        self._layout: list[tuple[torch.dtype, bool]] = []
        # The gradients of the last step, held weakly: the same tensors again need no new checks.
        self._seen: list[weakref.ref[torch.Tensor] | None] = []

    @property
    def steps(self) -> int:
        """How many steps were taken. Waits for the device when they are counted there."""
        return self._steps if self._counter is None else int(self._counter)

    @steps.setter
    def steps(self, count: int) -> None:
        if self._counter is None:
            self._steps = count
        else:
            self._counter.fill_(count)

    def _adopted(self, name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The caller's own state, checked against the parameters."""
        if len(tensors) != len(self.params):
            raise ValueError(f"{name}: has {len(tensors)} tensors for {len(self.params)} parameters")
        for index, (tensor, param) in enumerate(zip(tensors, self.params, strict=True)):
            if tensor.shape != param.shape or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(
                    f"{name}[{index}]: {tensor.dtype} of {tuple(tensor.shape)}; it must be contiguous float32 of "
                    f"{tuple(param.shape)}"
                )
            if tensor.device != param.device:
                raise ValueError(f"{name}[{index}]: is on {tensor.device}, but its parameter is on {param.device}")
        return [tensor.detach() for tensor in tensors]

    def step(self, grads: Sequence[torch.Tensor | None]) -> None:
        """One update. grads[i] is like params[i], in its dtype or float32; None leaves that parameter alone."""
        seen = len(grads) == len(self._seen) and all(
            ref() is grad if ref is not None else grad is None for ref, grad in zip(self._seen, grads, strict=True)
        )
        if not seen:
            self._check(grads)
            self._seen = [None if grad is None else weakref.ref(grad) for grad in grads]
        self._arrange(grads, seen)
        with on_device_of(self.params[0]):
            rate, root = self._count()
            for group in self._groups:
                _adamw_kernel[(len(group.chunks),)](
                    group.chunks,
                    group.addresses,
                    group.grad_addresses,
                    self._corrections,
                    1.0 - self.lr * self.weight_decay,
                    rate,
                    root,
                    self.betas[0],
                    self.betas[1],
                    self.eps,
                    ON_DEVICE=self._counter is not None,
                    HAS_MASTER=group.param != torch.float32,
                    PARAM=_TL[group.param],
                    GRAD=_TL[group.grad],
                    ALIGNED=group.aligned,
                    BLOCK=CHUNK,
                    num_warps=_WARPS,
                    maxnreg=_REGISTERS if group.aligned else None,
                )

    def _check(self, grads: Sequence[torch.Tensor | None]) -> None:
        if len(grads) != len(self.params):
            raise ValueError(f"grads: has {len(grads)} tensors for {len(self.params)} parameters")
        for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            if grad is None:
                continue
            if grad.shape != param.shape or not grad.is_contiguous():
                raise ValueError(
                    f"grads[{index}]: shape {tuple(grad.shape)}, stride {grad.stride()}; it must be contiguous and of "
                    f"shape {tuple(param.shape)}"
                )
            check_beside(f"grads[{index}]", grad, f"params[{index}]", param, dtypes=(torch.float32,))

    def _count(self) -> tuple[float, float]:
        """The step's rate, and one over the root of the second bias correction where the host counts."""
        beta1, beta2 = self.betas
        if self._counter is None:
            self._steps += 1
            return self.lr / (1.0 - beta1**self._steps), (1.0 - beta2**self._steps) ** -0.5
        logs = [math.log(beta) if beta else -math.inf for beta in (beta1, beta2)]
        _count_kernel[(1,)](self._counter, self._corrections, *logs, num_warps=1)
        return self.lr, 1.0

    def _arrange(self, grads: Sequence[torch.Tensor | None], seen: bool) -> None:
        """Make the tables when dtypes or alignment are new, else write only the gradients' addresses that changed."""
        if not seen:
            layout = [
                (param.dtype if grad is None else grad.dtype, self._aligned(index, grad))
                for index, (param, grad) in enumerate(zip(self.params, grads, strict=True))
            ]
            if layout != self._layout:
                self._groups, self._layout = self._make_groups(layout), layout
        for group in self._groups:
            addresses = [0 if (grad := grads[index]) is None else grad.data_ptr() for index in group.members]
            if addresses != group.known:
                group.grad_addresses.copy_(torch.tensor(addresses, dtype=torch.int64))
                group.known = addresses

    def _aligned(self, index: int, grad: torch.Tensor | None) -> bool:
        tensors = (self.params[index], self.masters[index], self.exp_avgs[index], self.exp_avg_sqs[index], grad)
        return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)

    def _make_groups(self, layout: list[tuple[torch.dtype, bool]]) -> list[_Group]:
        device = self.params[0].device
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
        for index, (param, (grad_dtype, aligned)) in enumerate(zip(self.params, layout, strict=True)):
            if param.numel():
                kinds.setdefault((param.dtype, grad_dtype, aligned), []).append(index)
        groups = []
        for (param_dtype, grad_dtype, aligned), members in kinds.items():
            sizes = torch.tensor([self.params[index].numel() for index in members])
            counts = (sizes + CHUNK - 1) // CHUNK
            owner = torch.repeat_interleave(torch.arange(len(members)), counts)
            first = torch.cumsum(counts, 0) - counts
            turn = torch.arange(len(owner)) - first[owner]
            table = []
            for index in members:
                tensors = (self.params[index], self.masters[index], self.exp_avgs[index], self.exp_avg_sqs[index])
                pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
                table.append([*pointers, self.params[index].numel()])
            groups.append(
                _Group(
                    members,
                    param_dtype,
                    grad_dtype,
                    aligned,
                    torch.stack([owner, turn], dim=1).contiguous().to(device),
                    torch.tensor(table, dtype=torch.int64, device=device),
                    torch.zeros(len(members), dtype=torch.int64, device=device),
                    [],
                )
            )
        return groups
