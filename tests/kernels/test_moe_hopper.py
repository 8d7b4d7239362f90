"""The products of routed experts on Hopper: every partition on a thread of its own here, the kernel itself on a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.moe_hopper import ACROSS, ROWS, WEIGHTS, hopper_product_kernel
from kernels.moe_hopper_launch import product, product_launch, weights_product
from kernels.moe_order import Order, most_tiles
from kernels.moe_plan import HOPPER, Tile

_SPEC = importlib.util.spec_from_file_location("gluon_on_threads", Path(__file__).with_name("gluon_on_threads.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
threads: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(threads)

DTYPE = torch.bfloat16
#: Rows of each expert, rows beyond them all, width of the sum or of a, and columns.
CASES = {
    "uneven": ([70, 0, 129, 3, 64], 5, 72, 264),
    "one of several": ([0, 0, 200], 0, 136, 40),
    "none": ([0, 0], 7, 64, 256),
    "blocks divide": ([128, 256], 0, 128, 512),
}


def order_of(counts: list[int], beyond: int, device: str = "cpu") -> Order:
    """The order that has so many rows of each expert."""
    ends = torch.tensor(counts).cumsum(0).tolist()
    tiles = [
        (expert, at, min(at + 128, end))
        for expert, (count, end) in enumerate(zip(counts, ends, strict=True))
        for at in range(end - count, end, 128)
    ]
    many = most_tiles(ends[-1] + beyond, len(counts), 128)
    table = torch.tensor(tiles + [(-1, 0, 0)] * (many - len(tiles)), dtype=torch.int32).T.contiguous()
    rows = torch.arange(ends[-1] + beyond, dtype=torch.int32)
    return Order(rows, rows, torch.tensor(ends, dtype=torch.int32), table, 128)._replace(
        ends_E=torch.tensor(ends, dtype=torch.int32, device=device), tiles_3N=table.to(device)
    )


def drawn(kind: int, counts: list[int], beyond: int, length: int, columns: int) -> list[torch.Tensor]:
    """a, b and out of a product; rows beyond all experts' are NaN, out's are too before they are written."""
    generator = torch.Generator().manual_seed(length + columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DTYPE)

    rows, experts = sum(counts) + beyond, len(counts)
    a = normal(rows, length)
    a[sum(counts) :] = float("nan")
    if kind == WEIGHTS:
        b, out = normal(rows, columns), (experts, length, columns)
        b[sum(counts) :] = float("nan")
        return [a, b, torch.full(out, float("nan"), dtype=DTYPE)]
    b = normal(experts, columns, length) if kind == ROWS else normal(experts, length, columns)
    return [a, b, torch.full((rows, columns), float("nan"), dtype=DTYPE)]


def wanted(kind: int, counts: list[int], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float64; of rows, those that an expert has."""
    parts = a[: sum(counts)].double().split(counts)
    if kind == WEIGHTS:
        return torch.stack([x.T @ y for x, y in zip(parts, b[: sum(counts)].double().split(counts), strict=True)])
    weights = b.double() if kind == ACROSS else b.double().transpose(1, 2)
    return torch.cat([x @ weight for x, weight in zip(parts, weights, strict=True)])


def on_threads(
    kind: int, counts: list[int], tensors: list[torch.Tensor], order: Order, tile: Tile, programs: int
) -> None:
    launch = product_launch(*tensors, order, kind, tile)
    arguments = dict(launch.args)
    for name in ("a_desc", "b_desc"):
        descriptor = arguments[name]
        arguments[name] = threads.Descriptor(descriptor.base.view(descriptor.shape), list(descriptor.block_shape))
    arguments["out_ptr"] = threads.Memory(tensors[2].view(-1))
    arguments["places_ptr"] = threads.Memory(arguments["places_ptr"].reshape(-1))
    arguments["counter_ptr"] = threads.Memory(arguments["counter_ptr"])
    for name in ("many", "m_size", "n_size", "length", "tiles"):
        arguments[name] = threads.Scalar(arguments[name])
    arguments["STAGE_LAYOUT"] = None
    # Programs run one after the other: the first would draw every tile but those the others begin with.
    threads.run_on_threads(hopper_product_kernel, programs, arguments)


@pytest.mark.parametrize("kind", [ROWS, ACROSS, WEIGHTS])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("programs", [1, 2])
def test_the_partitions_together_compute_every_product(kind: int, case: Any, programs: int, assert_near: Any) -> None:
    counts, *_ = case
    tensors = drawn(kind, *case)
    order = order_of(counts, case[1])
    on_threads(kind, counts, tensors, order, HOPPER._replace(stages=2, group=2), programs)
    a, b, out = tensors
    here = out if kind == WEIGHTS else out[: sum(counts)]
    assert_near(here, wanted(kind, counts, a, b), 2)
    if kind != WEIGHTS:
        assert out[sum(counts) :].isnan().all()  # nobody's rows are written by nobody


@pytest.mark.parametrize("kind", [ROWS, ACROSS, WEIGHTS])
def test_a_nan_stays_with_its_expert(kind: int) -> None:
    counts = [70, 30, 0, 20]
    tensors = drawn(kind, counts, 3, 72, 40)
    for tensor in tensors[:2]:
        (tensor if kind == WEIGHTS or tensor is tensors[0] else tensor.view(-1, tensor.shape[-1]))[75, 3] = float("nan")
    if kind != WEIGHTS:
        tensors[1].nan_to_num_(0.0)
    on_threads(kind, counts, tensors, order_of(counts, 3), HOPPER._replace(stages=2), 1)
    out = tensors[2]
    if kind == WEIGHTS:
        assert out.isnan().flatten(1).any(1).tolist() == [False, True, False, False]
    else:
        assert out[:120].isnan().any(1).nonzero().flatten().tolist() == [75]


def test_nothing_is_read_before_its_copy_is_waited_for_nor_after_its_slot_was_given_back(
    monkeypatch: pytest.MonkeyPatch, assert_near: Any
) -> None:
    for late, pause in ((True, 0.0), (False, 0.002)):
        monkeypatch.setattr(threads, "LATE", late)
        monkeypatch.setattr(threads, "PAUSE_S", pause)
        for kind in (ROWS, ACROSS, WEIGHTS):
            tensors = drawn(kind, [70, 0, 129], 0, 200, 72)
            on_threads(kind, [70, 0, 129], tensors, order_of([70, 0, 129], 0), HOPPER._replace(stages=2), 1)
            assert_near(tensors[2], wanted(kind, [70, 0, 129], *tensors[:2]), 2)


COMPILE = """
import json
import torch
from kernels.moe_hopper_launch import product_launch
from kernels.moe_order import Order
from kernels.moe_plan import HOPPER
places = [torch.empty(n, dtype=torch.int32) for n in (4096, 4096, 8)]
order = Order(*places, torch.empty(3, 40, dtype=torch.int32), 128)
found = []
for kind, *shapes in [(0, (4096, 512), (8, 1024, 512), (4096, 1024)), (1, (4096, 512), (8, 512, 1024), (4096, 1024)),
                      (2, (4096, 512), (4096, 1024), (8, 512, 1024))]:
    tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    r = product_launch(*tensors, order, kind, HOPPER).compile()
    found.append([r.spills, r.shared, r.warpgroup_products, r.opcodes.get("UTMALDG", 0)])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_on_hopper_both_groups_multiply_whole_tiles_in_registers() -> None:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=root, env=kept, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for spills, shared, products, copies in json.loads(done.stdout.splitlines()[-1]):
        assert spills == 0
        assert shared <= 227 * 1024
        assert products == 8  # four of 64x256x16 in a step of each group
        assert copies >= 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [ROWS, ACROSS, WEIGHTS])
@pytest.mark.parametrize("case", [*CASES.values(), ([1000, 0, 1090, 300], 50, 1048, 2056)], ids=[*CASES, "large"])
@pytest.mark.parametrize("stages", [2, 4])
def test_the_kernel_on_its_gpu(kind: int, case: Any, stages: int, assert_near: Any) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    counts, beyond, *_ = case
    a, b, _ = [t.cuda() for t in drawn(kind, *case)]
    order, tile = order_of(counts, beyond, "cuda"), HOPPER._replace(stages=stages)
    for _ in range(3):
        if kind == WEIGHTS:
            out = weights_product(a, b, order, tile)
        else:
            out = product(a, b, order, kind == ACROSS, tile)[: sum(counts)]
        assert_near(out, wanted(kind, counts, a, b), 2)
