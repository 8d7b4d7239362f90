"""Ceilings are measured once for a machine, kept, and not believed beyond the datasheet."""

import json
import math
from dataclasses import replace

import pytest

from harness import ceilings as module
from harness.ceilings import believe, ensure_ceilings, machine_key, measure_ceilings
from harness.devices import lookup
from harness.machine_store import Ceilings, load_ceilings

CPU = {
    "gpu": "amd-epyc",
    "machine": "m",
    "stack": {"torch": "2.13.0", "driver": "580"},
    "host": {"device": "cpu", "cores": 2},
}
GPU = {**CPU, "gpu": "nvidia-h200", "host": {"device": "cuda", "cores": 16}}


def test_whose_ceilings_they_are():
    assert machine_key(CPU).cores == 2
    assert machine_key(CPU).driver is None
    assert machine_key(GPU).cores is None
    assert machine_key(GPU).driver == "580"


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(module, "CPU_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(module, "CPU_SIZES", (32, 64))
    monkeypatch.setattr(module, "CPU_BUDGET_S", 0.01)


def test_a_cpu_is_measured(small):
    found = measure_ceilings("cpu", CPU)
    assert set(found.matmul) <= {"float32", "bfloat16"}
    assert "float32" in found.matmul
    figures = [found.copy, found.read, found.launch_eager, *found.matmul.values()]
    assert all(x is not None and math.isfinite(x) and x > 0 for x in figures)
    assert found.launch_graph is None
    assert found.host_to_device is None
    assert 1e-8 < found.launch_eager < 1e-2
    assert found.cores == 2
    json.dumps(found.as_dict(), allow_nan=False)


def test_copy_counts_the_bytes_read_and_those_written(small, monkeypatch):
    monkeypatch.setattr(module, "steady_seconds", lambda *_: 0.5)
    monkeypatch.setattr(module, "launch_seconds", lambda *_: 1e-6)
    found = measure_ceilings("cpu", CPU)
    assert found.copy == 4 * (1 << 20)
    assert found.read == 2 * (1 << 20)
    # 0.5 s is too slow to go on from the small product to the large one
    assert found.matmul["float32"] == 2 * 32**3 / 0.5
    assert found.details["matmul.float32"]["size"] == 32


def test_a_size_that_would_take_too_long_is_left_out(small, monkeypatch):
    import torch

    monkeypatch.setattr(module, "steady_seconds", lambda *_: 0.1)
    figures, details = {}, {}
    product = module._plain_product(torch.float32)
    module._best_product("float32", product, (32, 64), torch.device("cpu"), 0.01, figures, {}, details)
    assert details["matmul.float32"]["size"] == 32


@pytest.mark.parametrize("make", ["_float8_product", "_int8_product"])
def test_the_eight_bit_products_are_products(make):
    import torch

    assert getattr(module, make)(32, torch.device("cpu"))().shape == (32, 32)


def test_the_best_size_is_kept(small, monkeypatch):
    monkeypatch.setattr(module, "steady_seconds", lambda *_: 1e-4)
    assert measure_ceilings("cpu", CPU).matmul["float32"] == pytest.approx(2 * 64**3 / 1e-4)


def test_a_product_that_this_machine_cannot_do_is_left_out_with_the_reason(small, monkeypatch):
    plain = module._plain_product

    def make(dtype):
        if "bfloat16" not in str(dtype):
            return plain(dtype)

        def fails(_size, _device):
            raise RuntimeError("no bfloat16 here\ntrace")

        return fails

    monkeypatch.setattr(module, "_plain_product", make)
    found = measure_ceilings("cpu", CPU)
    assert set(found.matmul) == {"float32"}
    assert found.refused["matmul.bfloat16"] == "RuntimeError: no bfloat16 here"


H200 = lookup("NVIDIA H200")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("copy", 4.28e12, 5.1e12),
        ("read", 4.5e12, 6e12),
        ("matmul.bfloat16", 711e12, 1979e12),
        ("matmul.float8", 1251e12, 3958e12),
        ("matmul.float32", 50e12, 300e12),
        ("host_to_device", 55e9, 120e9),
        ("device_to_host", 55e9, 120e9),
        ("link", 395e9, 500e9),
        ("launch_eager", 9.5e-6, 0.0),
        ("copy", 4.28e12, float("inf")),
        ("read", 4.5e12, float("nan")),
    ],
)
def test_what_is_above_the_datasheet_is_refused(name, good, bad):
    assert believe({name: good}, H200) == ({name: good}, {})
    kept, refused = believe({name: bad}, H200)
    assert kept == {}
    assert refused[name]


def test_an_unknown_device_has_no_datasheet_to_be_above():
    assert believe({"copy": 9e12}, lookup("NVIDIA H999")) == ({"copy": 9e12}, {})
    assert believe({"copy": 9e12}, None) == ({"copy": 9e12}, {})


def test_they_are_measured_once_and_kept(tmp_path):
    calls = []

    def measure(device, where):
        calls.append(device)
        key = machine_key(where)
        return Ceilings(
            key.gpu, key.machine, key.torch, key.driver, f"2026-01-0{len(calls)}T00:00:00Z", key.cores, copy=1.0e10
        )

    first, problems = ensure_ceilings("cpu", CPU, folder=tmp_path, measure=measure)
    again, _ = ensure_ceilings("cpu", CPU, folder=tmp_path, measure=measure)
    assert (calls, problems) == (["cpu"], [])
    assert again == first
    fresh, _ = ensure_ceilings("cpu", CPU, folder=tmp_path, measure=measure, recalibrate=True)
    assert fresh == replace(first, time="2026-01-02T00:00:00Z")
    assert load_ceilings(machine_key(CPU), tmp_path)[0] == fresh
    assert len(list((tmp_path / "amd-epyc").iterdir())) == 2
    other = {**CPU, "host": {"device": "cpu", "cores": 8}}
    ensure_ceilings("cpu", other, folder=tmp_path, measure=measure)
    assert len(calls) == 3


def test_every_ceiling_of_a_gpu_is_asked_for(monkeypatch):
    """The way through, with each call made once on the CPU in place of the device."""
    import torch

    def once(call, *_):
        call()
        return 1e-3

    monkeypatch.setattr(module, "GPU_SIZES", (32, 64))
    monkeypatch.setattr(module, "steady_seconds", once)
    monkeypatch.setattr(module, "launch_seconds", once)
    monkeypatch.setattr(module, "_graph_launch", lambda _one, count: 1e-3 / count)
    monkeypatch.setattr(module, "_host_link", lambda _device: {"host_to_device": 1.0, "device_to_host": 2.0})
    monkeypatch.setattr(module, "_peer_copy", lambda _device: 3.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (1 << 20, 1 << 21))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    figures, refused, details = {}, {}, {}
    module._measure_gpu(torch.device("cpu"), figures, refused, details)
    assert refused == {}
    products = {f"matmul.{d}" for d in ("bfloat16", "float16", "float32", "tf32", "float64", "float8", "int8")}
    others = {"copy", "read", "launch_eager", "launch_graph", "host_to_device", "device_to_host", "link"}
    assert set(figures) == products | others
    assert details["copy_bytes"] == 1 << 18
    assert figures["copy"] == 2 * (1 << 18) / 1e-3
    assert figures["matmul.int8"] == 2 * 64**3 / 1e-3
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.gpu
def test_a_gpu_is_measured_and_believed():
    from harness.provenance import provenance

    found = measure_ceilings("cuda", provenance("cuda", ask_torch=True))
    assert found.copy is not None
    assert "bfloat16" in found.matmul
    assert not [name for name in found.refused if not name.startswith("matmul.")]
    assert found.launch_graph < found.launch_eager
