"""Measures what this machine can do: copy, read, matrix products by dtype, launch cost, links.

A record's share of a ceiling says more than its share of a datasheet, which no program reaches. A figure above the
datasheet is refused with the reason and not kept as a ceiling. torch is imported inside the functions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.devices import Device, Found, canonical_dtype, lookup, peak_flops
from harness.machine_store import Ceilings, MachineKey, load_ceilings, save_ceilings
from harness.metrics import BANDWIDTH_SLACK, RATE_SLACK
from harness.record import utc_now
from harness.stopwatch import launch_seconds, steady_seconds

if TYPE_CHECKING:
    import torch

GPU_SIZES, CPU_SIZES = (4096, 8192), (512, 1024)
GPU_COPY_BYTES, CPU_COPY_BYTES = 2 << 30, 128 << 20
HOST_LINK_BYTES, PEER_COPY_BYTES = 256 << 20, 1 << 30
#: A product that would take longer than this is left out: its size tells nothing that the smaller one does not.
SLOWEST_S = 0.2
#: Seconds for each single ceiling; on a CPU all of them together stay under three.
GPU_BUDGET_S, CPU_BUDGET_S = 0.3, 0.15


def machine_key(where: Mapping[str, Any]) -> MachineKey:
    """Whose ceilings these are, from :func:`harness.provenance.provenance`; a CPU's depend on the cores allowed."""
    stack, host = where["stack"], where["host"]
    on_cpu = host["device"] == "cpu"
    return MachineKey(
        gpu=str(where["gpu"]),
        machine=str(where["machine"]),
        torch=str(stack.get("torch", "none")),
        driver=None if on_cpu else stack.get("driver"),
        cores=int(host["cores"]) if on_cpu else None,
    )


def ensure_ceilings(
    device: str,
    where: Mapping[str, Any],
    *,
    folder: Path | None = None,
    recalibrate: bool = False,
    measure: Callable[[str, Mapping[str, Any]], Ceilings] | None = None,
) -> tuple[Ceilings, list[str]]:
    """The kept ceilings of this machine, or new ones, measured and kept; and kept files that could not be read.

    Raises:
        StoreError: the new ones cannot be kept.
    """
    kept, problems = load_ceilings(machine_key(where), folder)
    if kept is not None and not recalibrate:
        return kept, problems
    fresh = (measure or measure_ceilings)(device, where)
    save_ceilings(fresh, folder)
    return fresh, problems


def measure_ceilings(device: str, where: Mapping[str, Any]) -> Ceilings:
    """Measures every ceiling of ``cpu``, ``cuda`` or ``cuda:N`` now.

    A dtype that the device cannot multiply, or a product that fails, is left out and ``refused`` says why.
    """
    import torch

    begin = time.perf_counter()
    key, target = machine_key(where), torch.device(device)
    host = where["host"]
    figures: dict[str, float] = {}
    refused: dict[str, str] = {}
    details: dict[str, Any] = {}
    if target.type == "cuda":
        with torch.cuda.device(target):
            _measure_gpu(target, figures, refused, details)
        found: Found | None = lookup(str(host.get("gpu_name", "")), host.get("gpu_memory_bytes"))
    else:
        _measure_cpu(target, figures, refused, details)
        found = None
    kept, unbelieved = believe(figures, found)
    return Ceilings(
        gpu=key.gpu,
        machine=key.machine,
        torch=key.torch,
        driver=key.driver,
        cores=key.cores,
        time=utc_now(),
        copy=kept.get("copy"),
        read=kept.get("read"),
        matmul={name.removeprefix("matmul."): v for name, v in kept.items() if name.startswith("matmul.")},
        launch_eager=kept.get("launch_eager"),
        launch_graph=kept.get("launch_graph"),
        host_to_device=kept.get("host_to_device"),
        device_to_host=kept.get("device_to_host"),
        link=kept.get("link"),
        refused={**refused, **unbelieved},
        details=details,
        seconds=time.perf_counter() - begin,
    )


def believe(figures: Mapping[str, float], found: Found | Device | None) -> tuple[dict[str, float], dict[str, str]]:
    """Splits figures into those that can be, and those that cannot with the reason."""
    row = found.device if isinstance(found, Found) else found
    kept: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, value in figures.items():
        bound = None if row is None else _bound(name, row)
        if not math.isfinite(value) or value <= 0:
            refused[name] = f"{value} is no measurement"
        elif bound is not None and value > bound:
            refused[name] = f"{value:.4g} is above the {bound:.4g} that the datasheet of {row and row.names[0]} allows"
        else:
            kept[name] = value
    return kept, refused


def _bound(name: str, row: Device) -> float | None:
    if name in ("copy", "read"):
        return row.memory_bandwidth * BANDWIDTH_SLACK
    if name in ("host_to_device", "device_to_host"):
        return row.host_link * BANDWIDTH_SLACK
    if name == "link":
        return row.link_each_way * BANDWIDTH_SLACK
    if name.startswith("matmul."):
        peak = peak_flops(row, name.removeprefix("matmul.")).value
        return None if peak is None else peak * row.accumulate_factor * RATE_SLACK
    return None


def _measure_gpu(
    device: torch.device, figures: dict[str, float], refused: dict[str, str], details: dict[str, Any]
) -> None:
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    details["copy_bytes"] = min(GPU_COPY_BYTES, int(free) // 4) // 4 * 4
    figures.update(_copy_and_read(device, details["copy_bytes"], GPU_BUDGET_S))
    for name, product in _gpu_products().items():
        _best_product(name, product, GPU_SIZES, device, GPU_BUDGET_S, figures, refused, details)
    one = torch.zeros(1, device=device)
    figures["launch_eager"] = launch_seconds(lambda: one.add_(1), True, 1000)
    figures["launch_graph"] = _graph_launch(one, 1000)
    figures.update(_host_link(device))
    if torch.cuda.device_count() > 1:
        figures["link"] = _peer_copy(device)
    torch.cuda.empty_cache()


def _measure_cpu(
    device: torch.device, figures: dict[str, float], refused: dict[str, str], details: dict[str, Any]
) -> None:
    import torch

    details["threads"], details["copy_bytes"] = torch.get_num_threads(), CPU_COPY_BYTES
    figures.update(_copy_and_read(device, CPU_COPY_BYTES, CPU_BUDGET_S))
    for name in ("float32", "bfloat16"):
        product = _plain_product(getattr(torch, name))
        # bfloat16 without its instructions runs a hundred times slower: the small size shows it, and suffices then.
        small = _best_product(name, product, CPU_SIZES[:1], device, CPU_BUDGET_S / 3, figures, refused, details)
        if small is not None and small < CPU_BUDGET_S / 10:
            _best_product(name, product, CPU_SIZES[1:], device, CPU_BUDGET_S, figures, refused, details)
    one = torch.zeros(1)
    figures["launch_eager"] = launch_seconds(lambda: one.add_(1), False, 1000)


def _copy_and_read(device: torch.device, size: int, budget_s: float) -> dict[str, float]:
    """Bytes/s of a copy of ``size`` bytes, read and written ones counted, and of the better of two reductions."""
    import torch

    cuda = device.type == "cuda"
    source = torch.empty(size // 4, device=device, dtype=torch.float32).normal_()
    target = torch.empty_like(source)
    copy_s = steady_seconds(lambda: target.copy_(source), cuda, budget_s)
    sum_s = steady_seconds(lambda: torch.sum(source), cuda, budget_s)
    max_s = steady_seconds(lambda: torch.amax(source), cuda, budget_s)
    return {"copy": 2 * size / copy_s, "read": size / min(sum_s, max_s)}


def _host_link(device: torch.device) -> dict[str, float]:
    """Bytes/s between pinned host memory and the device, each way alone."""
    import torch

    there = torch.empty(HOST_LINK_BYTES, dtype=torch.uint8, device=device)
    here = torch.empty(HOST_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    up = steady_seconds(lambda: there.copy_(here, non_blocking=True), True, GPU_BUDGET_S)
    down = steady_seconds(lambda: here.copy_(there, non_blocking=True), True, GPU_BUDGET_S)
    return {"host_to_device": HOST_LINK_BYTES / up, "device_to_host": HOST_LINK_BYTES / down}


def _peer_copy(device: torch.device) -> float:
    """Bytes/s from this GPU to the next one of the host, one way."""
    import torch

    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    here = torch.empty(PEER_COPY_BYTES, dtype=torch.uint8, device=device)
    there = torch.empty(PEER_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    return PEER_COPY_BYTES / steady_seconds(lambda: there.copy_(here), True, GPU_BUDGET_S)


Product = Callable[[int, "torch.device"], Callable[[], object]]


def _best_product(
    name: str,
    product: Product,
    sizes: tuple[int, ...],
    device: torch.device,
    budget_s: float,
    figures: dict[str, float],
    refused: dict[str, str],
    details: dict[str, Any],
) -> float | None:
    """Keeps the best rate over the sizes; gives the seconds of the last run, or None when it does not run here."""
    seconds: float | None = None
    done = 0
    for size in sizes:
        if seconds is not None and seconds * (size / done) ** 3 > SLOWEST_S:
            break
        try:
            with _float32_precision("high" if name == "tf32" else "highest"):
                seconds = steady_seconds(product(size, device), device.type == "cuda", budget_s)
        except (RuntimeError, ValueError, NotImplementedError, AttributeError) as err:
            # What a device or a build cannot multiply it says in any of these ways; the rest is measured all the same.
            refused[f"matmul.{name}"] = f"{type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"[:200]
            return None
        done, rate = size, 2 * size**3 / seconds
        if rate > figures.get(f"matmul.{name}", 0.0):
            figures[f"matmul.{name}"] = rate
            details[f"matmul.{name}"] = {"size": size, "seconds": seconds}
    return seconds


def _gpu_products() -> dict[str, Product]:
    import torch

    products: dict[str, Product] = {n: _plain_product(getattr(torch, n)) for n in ("bfloat16", "float16", "float32")}
    products["tf32"] = _plain_product(torch.float32)
    products["float64"] = _plain_product(torch.float64)
    products["float8"] = _float8_product
    products["int8"] = _int8_product
    assert all(canonical_dtype(name) == name for name in products)
    return products


def _plain_product(dtype: torch.dtype) -> Product:
    def make(size: int, device: torch.device) -> Callable[[], object]:
        import torch

        # Random, never zeros: zeros draw less power and run faster than data does.
        a = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        b = torch.randn(size, size, device=device, dtype=torch.float32).to(dtype)
        out = torch.empty(size, size, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    return make


def _float8_product(size: int, device: torch.device) -> Callable[[], object]:
    import torch

    a = torch.randn(size, size, device=device).to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)

    def call() -> object:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def _int8_product(size: int, device: torch.device) -> Callable[[], object]:
    import torch

    a = torch.randint(-128, 128, (size, size), device=device, dtype=torch.int8)
    b = torch.randint(-128, 128, (size, size), device=device, dtype=torch.int8).t()
    return lambda: torch._int_mm(a, b)


@contextmanager
def _float32_precision(wanted: str) -> Iterator[None]:
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _graph_launch(one: torch.Tensor, count: int) -> float:
    """Seconds a kernel costs inside a replayed graph of ``count`` of them."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            one.add_(1)
    return steady_seconds(graph.replay, True, GPU_BUDGET_S) / count
