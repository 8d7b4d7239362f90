"""Small host tensors on their way to the device, without a wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; the host goes on at once, for a copy out of pageable memory would wait for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
