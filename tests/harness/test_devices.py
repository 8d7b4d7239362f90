"""The device in use decides its peaks; what no row describes has none, with the reason."""

import itertools
import math
import subprocess
import sys

import pytest

from harness.devices import DEVICES, Found, canonical_dtype, gpu_slug, lookup, peak_flops

GIB = 1 << 30
DTYPES = {"float64", "float64_tensor", "float32", "tf32", "bfloat16", "float16", "float8", "int8", "float4"}


@pytest.mark.parametrize("row", DEVICES, ids=lambda row: row.names[0])
def test_each_row_is_complete_and_consistent(row):
    assert row.source
    assert row.form in {"SXM", "PCIe", "NVL", "OAM", "superchip"}
    assert set(row.peaks) <= DTYPES
    figures = [
        *row.peaks.values(),
        row.memory_gib,
        row.memory_bandwidth,
        row.link_total,
        row.host_link,
        row.power,
    ]
    assert all(math.isfinite(x) and x > 0 for x in figures)
    assert row.link_each_way * 2 == row.link_total
    assert 1e11 < row.memory_bandwidth < 2e13
    if "float8" in row.peaks:
        assert row.peaks["float8"] == pytest.approx(2 * row.peaks["bfloat16"], rel=0.02)
    if "float4" in row.peaks:
        assert row.peaks["float4"] > row.peaks["float8"]
    assert row.peaks["float16"] > row.peaks["float32"]


def test_no_two_rows_answer_to_the_same_name_and_size():
    for one, other in itertools.combinations(DEVICES, 2):
        names = {n.casefold() for n in one.names} & {n.casefold() for n in other.names}
        assert not names or abs(one.memory_gib - other.memory_gib) > 0.25 * one.memory_gib


@pytest.mark.parametrize(
    ("name", "mib", "form", "bf16", "bandwidth"),
    [
        ("NVIDIA H200", 143771, "SXM", 989.4e12, 4.8e12),
        ("NVIDIA H200 NVL", 143771, "NVL", 835.5e12, 4.8e12),
        ("NVIDIA H100 80GB HBM3", 81559, "SXM", 989.4e12, 3.35e12),
        ("NVIDIA H100 PCIe", 81559, "PCIe", 756e12, 2.039e12),
        ("NVIDIA H100 NVL", 95830, "NVL", 835.5e12, 3.9e12),
        ("NVIDIA A100-SXM4-40GB", 40960, "SXM", 312e12, 1.555e12),
        ("A100-SXM4-40GB", 40536, "SXM", 312e12, 1.555e12),
        ("NVIDIA A100 80GB PCIe", 81920, "PCIe", 312e12, 1.935e12),
        ("NVIDIA L40S", 46068, "PCIe", 362.05e12, 0.864e12),
        ("NVIDIA A10G", 23028, "PCIe", 70e12, 0.6e12),
        ("nvidia  a10", 23028, "PCIe", 125e12, 0.6e12),
        ("NVIDIA B200", 183359, "SXM", 2250e12, 8e12),
        ("AMD Instinct MI300X", 196592, "OAM", 1307.4e12, 5.3e12),
    ],
)
def test_the_device_in_use_decides(name, mib, form, bf16, bandwidth):
    row = lookup(name, mib << 20).device
    assert row is not None
    assert row.form == form
    assert peak_flops(row, "bf16").value == bf16
    assert row.memory_bandwidth == bandwidth
    assert peak_flops(row, "torch.bfloat16").source == row.source


@pytest.mark.parametrize(
    ("name", "gib", "why"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, "no row"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 9.8, "MIG"),
        ("NVIDIA H300", 200, "no row"),
        ("NVIDIA H200", 18, "slice"),
        ("NVIDIA H200", 282, "slice"),
        ("", 80, "no name"),
    ],
)
def test_an_unknown_gpu_has_no_peak_and_says_why(name, gib, why):
    found = lookup(name, int(gib * GIB))
    assert found.device is None
    assert why in (found.reason or "")
    peak = peak_flops(found, "bfloat16")
    assert peak.value is None
    assert peak.reason == found.reason


def test_a_card_split_by_mig_is_refused_whatever_its_name():
    assert lookup("NVIDIA H200", 140 * GIB, mig=True).device is None


def test_a_cpu_and_an_unknown_dtype_have_no_peak():
    assert "CPU" in (peak_flops(None, "float32").reason or "")
    h200 = lookup("NVIDIA H200").device
    assert "int3" in (peak_flops(h200, "int3").reason or "")
    assert "float4" in (peak_flops(h200, "nvfp4").reason or "")
    assert peak_flops(lookup("Tesla T4"), "bfloat16").value is None


def test_float64_products_may_use_the_matrix_units_and_float32_is_not_tf32():
    h200 = lookup("NVIDIA H200").device
    assert peak_flops(h200, "float64").value == 67e12
    assert peak_flops(h200, "float32").value == 67e12
    assert peak_flops(h200, "tf32").value == 494.7e12


@pytest.mark.parametrize(
    ("spelling", "key"),
    [("torch.float8_e4m3fn", "float8"), ("FP16", "float16"), ("half", "float16"), ("complex64", None)],
)
def test_spellings_of_dtypes(spelling, key):
    assert canonical_dtype(spelling) == key


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-sxm4-40gb"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia-a100-sxm4-40gb-mig-1g-5gb"),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"),
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654"),
        ("AMD EPYC", "amd-epyc"),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "intel-xeon-platinum-8481c"),
        ("../../etc/passwd", "etc-passwd"),
        ("", "unknown"),
    ],
)
def test_slugs_are_file_safe_and_stable(name, slug):
    assert gpu_slug(name) == slug


def test_found_is_what_lookup_gives_and_no_torch_is_imported():
    assert isinstance(lookup("NVIDIA H200"), Found)
    code = "import sys, harness.devices; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
