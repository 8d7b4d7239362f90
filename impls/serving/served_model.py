"""The model that all engines and decode loops of a process read."""

from __future__ import annotations

from harness.pair import Context
from harness.workload import Workload
from impls.model.decoder import Decoder
from impls.model.resolve import model_for


def decoder_for(workload: Workload, ctx: Context) -> Decoder:
    """The workload's model; on a GPU with its small operations fused, as the engine has it."""
    model = model_for(workload, ctx)
    if ctx.device.type != "cuda":
        return model
    from impls.serving.fast_decoder import fast_decoder

    return fast_decoder(model)


def shared(workload: Workload, ctx: Context) -> list[Decoder]:
    """For ``Pair(shared=...)``: loaded once, read by every variant, and needed by each of them alone too."""
    return [decoder_for(workload, ctx)]
