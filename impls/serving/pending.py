"""Tokens that were drawn by the last launch and are still on the device when the next one is prepared."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_pending(tokens_T: Tensor, rows_T: Tensor, drawn_B: Tensor) -> Tensor:
    """Token ids with those that the host does not know yet taken from the last launch: its row, or -1 for none.

    A row whose logits were not numbers drew no token; any other stands in for it, since its sequence ends here.
    """
    return torch.where(rows_T >= 0, drawn_B[rows_T.clamp(min=0)].clamp(min=0), tokens_T)
