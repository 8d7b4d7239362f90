"""Who holds memory while a workload is checked and timed, and what of it need not be held.

Bytes at the worst moment of a check, on the rank that judges:

    inputs + truth + case + result + the largest tensor of the result

where truth and result are every tensor that is compared, whole. The oracle's case is gone by then: its result is what
is kept, on the host where it is large. Of the baseline's result only the form is kept, unless its own error sets the
others' bound. Other cases stay beside it only while all of them together take at most half of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

#: A truth larger than this share of the device goes to the host: beside it a case and its result must fit.
TRUTH_SHARE = 0.25
#: Cases that together would hold more than this share of the device are closed after their check and built anew.
CASES_SHARE = 0.5
#: What of the device can be counted on: the rest is the context's, the communicator's, and lost between blocks.
USABLE_SHARE = 0.85


def capacity(device: torch.device) -> int | None:
    """Bytes of the device; None for a CPU, whose memory is not this process's own to count."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def held_now(device: torch.device) -> int:
    """Bytes held by tensors now; 0 on a CPU, which does not count them."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device))


def truth_of(result: Mapping[str, Any], room: int | None) -> Mapping[str, Any]:
    """The oracle's result for keeps: on the host when it is more than its share of ``room`` bytes."""
    size = sum(value.nbytes for value in result.values() if isinstance(value, torch.Tensor))
    if room is None or size <= TRUTH_SHARE * room:
        return result
    return {name: v.detach().cpu() if isinstance(v, torch.Tensor) else v for name, v in result.items()}


def own_copy(result: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that the case cannot overwrite. What the case made for the result alone is let go tensor by tensor, so
    that there are never two of the whole."""
    left = dict(result)
    del result
    copy = {}
    for name in list(left):
        value = left.pop(name)
        copy[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return copy


def form_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes, dtypes and strides, without storage: what a check compares when the values are not asked for."""
    return {
        name: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
        if isinstance(v, torch.Tensor)
        else v
        for name, v in result.items()
    }


def crowds(held: int, cases: int, room: int | None) -> bool:
    """Whether ``cases`` of which each holds as much as this one would take more than their share of the device."""
    return room is not None and held * cases > CASES_SHARE * room


def fit_together(inputs: int, held: Sequence[int], peaks: Sequence[int], room: int | None) -> bool:
    """Whether all cases can be loaded side by side while each of them runs. peaks: above what is held before a run."""
    if room is None or not held:
        return True
    return inputs + sum(held) + max(peaks, default=0) <= USABLE_SHARE * room
