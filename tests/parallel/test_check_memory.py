"""What a check of a training step holds, counted tensor by tensor, and that the quick workloads fit a GPU by it."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import check, holding, memory
from harness.discover import find, workloads_of
from harness.job import Events, MeasureJob
from harness.measure import Measurement
from harness.pair import Variant
from harness.ranked import Agreement
from harness.workload import parse_workload
from impls.parallel import data_parallel, shared

#: Of an H200 as its driver tells it.
GPU_BYTES = 150_754_820_096
#: Two tokens a row: activations are nothing beside the weights.
DIMS = {"layers": 2, "width": 128, "ffn": 352, "heads": 4, "kv_heads": 4, "vocab": 512, "batch": 1, "seq": 2}


class Live(TorchDispatchMode):
    """Bytes of all storages that operations have made and that are still there, now and at most."""

    def __init__(self):
        super().__init__()
        self.sizes, self.most = {}, 0

    @property
    def now(self):
        return sum(self.sizes.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.device.type != "meta":
                storage = x.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
        self.most = max(self.most, self.now)
        return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_check_holds_one_case_and_what_is_compared(dtype, tmp_path, monkeypatch):
    workload = parse_workload("test", {"name": "w", "tier": "smoke", "dtype": dtype, "ranks": 1, **DIMS}, "test")
    alone = {name: Variant(shared.OneProcess) for name in ("baseline", "optimized", "third")}
    pair = replace(data_parallel.PAIR, inputs=shared.train_inputs, variants=alone)
    job = MeasureJob("test", (workload,), tuple(alone), "cpu", str(tmp_path / "events"), timing=False)
    events = Events(tmp_path / "events", 0)
    measurement = Measurement(pair, workload, job, Agreement(0, 1), events)
    measurement.room = 4 * (numbers := shared.model_config(workload).parameters)  # small enough that every case crowds
    with Live() as live:
        monkeypatch.setattr(holding, "held_now", lambda device: live.now)
        monkeypatch.setattr(memory, "allocated", lambda device: live.now)
        monkeypatch.setattr(check, "CHUNK", 4096)
        monkeypatch.setattr(holding, "TRUTH_SHARE", 100)
        measurement.run()
    events.close()
    assert {e.status for e in measurement.entries} == {""}
    formula = shared.check_bytes(numbers, numbers, dtype)
    assert formula <= live.most <= formula * 1.03 + 4 * DIMS["vocab"] * DIMS["width"]


@pytest.mark.parametrize("name", ["data_parallel", "tensor_parallel"])
def test_the_check_of_the_quick_workloads_fits_beside_activations(name):
    for workload in workloads_of(find(name)):
        if workload.tier != "quick":
            continue
        numbers = shared.model_config(workload).parameters
        assert shared.check_bytes(numbers, numbers, workload.dtype) < 0.75 * GPU_BYTES, workload.name
