"""The peer of tensor_parallel: torch.distributed.tensor.parallel with the plan of its tutorial.

Its collectives are functional ones issued by DTensor, not by our link: their bytes are not counted, and the step
without communication is not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness.pair import Context, Inputs
from harness.workload import Workload
from impls.parallel import shared
from impls.parallel.link import Link
from impls.parallel.shared import TrainCase, adamw


class DTensorParallel(TrainCase):
    """Columns then rows by ``parallelize_module``; norms are whole on every rank."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        if ctx.mesh is None:
            raise ValueError("torch's tensor parallelism needs a mesh: start several ranks (--ranks N)")
        self.mesh = ctx.mesh
        # Weights are cut when they are loaded; zeros here are cut the same way.
        model = shared.empty_model(shared.model_config(workload), ctx)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        plan = {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "layers.*.self_attn.q_proj": ColwiseParallel(),
            "layers.*.self_attn.k_proj": ColwiseParallel(),
            "layers.*.self_attn.v_proj": ColwiseParallel(),
            "layers.*.self_attn.o_proj": RowwiseParallel(),
            "layers.*.mlp.gate_proj": ColwiseParallel(),
            "layers.*.mlp.up_proj": ColwiseParallel(),
            "layers.*.mlp.down_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, self.mesh, plan)
        super().__init__(workload, ctx, model, Link())

    def load(self, inputs: Inputs) -> None:
        self._inputs = inputs
        with torch.no_grad():
            for name, param in self.params.items():
                whole = inputs[f"weight.{name}"]
                if isinstance(param, DTensor):
                    whole = distribute_tensor(whole, param.device_mesh, param.placements)
                param.copy_(whole)
                self.masters[name].copy_(param)
        # Operations on lists of tensors take no mixture of DTensors and tensors: a group of parameters for each kind.
        cut = [m for m in self.masters.values() if isinstance(m, DTensor)]
        kept = [m for m in self.masters.values() if not isinstance(m, DTensor)]
        groups: list[dict[str, Any]] = [{"params": cut}, {"params": kept}]
        self.optimizer = torch.optim.AdamW(groups, **adamw(self.ctx.dtype))
        self.release()
        self.tokens = inputs["tokens"]

    def forward_backward(self) -> dict[str, Tensor]:
        logits = self.model(self.tokens[:, :-1])
        (shared.summed_loss(logits, self.tokens[:, 1:]) / logits.shape[:-1].numel()).backward()
        return self.own_grads()

    def hidden(self) -> Tensor:
        return shared.plain_hidden(self.model, self.tokens[:, :-1])

    def _whole(self, name: str, part: Tensor) -> Tensor:
        return part.full_tensor() if isinstance(part, DTensor) else part

    def counters(self) -> Mapping[str, float]:
        return {}
