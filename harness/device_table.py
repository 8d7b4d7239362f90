"""GPU types as rows: dense peaks, memory, links and power, each with the document it was read from.

Peaks are dense (2:4 sparsity doubles many printed figures; they are halved here) and at boost clock, in
FLOP/s or, for integers, OP/s. Where a card's rate depends on the accumulator, the row holds the float32 one
and its note says so. ``memory_gib`` is the size that the vendor prints, which is close to what NVML reports
in GiB. A figure that the document does not give is absent: nothing here is derived from a related card.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TERA = 1e12
GIGA = 1e9

HALF_RATE = "16- and 8-bit floats accumulate in float32; accumulating in float16 runs at up to twice this"


@dataclass(frozen=True)
class Device:
    """One GPU type.

    names: what NVML and torch call it, the current driver's spelling first; compared without case, a leading
        ``NVIDIA`` and repeated spaces.
    form: ``SXM``, ``PCIe``, ``NVL``, ``OAM`` or ``superchip``.
    peaks: dense peak by canonical dtype (``float64``, ``float64_tensor``, ``float32``, ``tf32``,
    ``bfloat16``,
        ``float16``, ``float8``, ``int8``, ``float4``), FLOP/s or OP/s.
    memory_bandwidth: bytes/s. link: what joins the GPUs of a host; link_total both ways together, bytes/s.
    host_link: bytes/s each way. power: the default limit of the board, watts.
    """

    names: tuple[str, ...]
    form: str
    memory_gib: float
    memory_bandwidth: float
    peaks: Mapping[str, float]
    link: str
    link_total: float
    host_link: float
    power: float
    source: str
    note: str = ""

    @property
    def accumulate_factor(self) -> float:
        """How far above the row's 16- and 8-bit rates the card may go by accumulating in float16."""
        return 2.0 if self.note == HALF_RATE else 1.0

    @property
    def link_each_way(self) -> float:
        """Bytes/s that one GPU can send while it receives as much."""
        return self.link_total / 2


def _tera(**peaks: float) -> dict[str, float]:
    return {dtype: value * TERA for dtype, value in peaks.items()}


HOPPER_SXM = _tera(
    float64=34,
    float64_tensor=67,
    float32=67,
    tf32=494.7,
    bfloat16=989.4,
    float16=989.4,
    float8=1978.9,
    int8=1978.9,
)
HOPPER_NVL = _tera(
    float64=30,
    float64_tensor=60,
    float32=60,
    tf32=417.5,
    bfloat16=835.5,
    float16=835.5,
    float8=1670.5,
    int8=1670.5,
)
AMPERE_100 = _tera(float64=9.7, float64_tensor=19.5, float32=19.5, tf32=156, bfloat16=312, float16=312, int8=624)

PCIE3, PCIE4, PCIE5, C2C = 16 * GIGA, 32 * GIGA, 64 * GIGA, 450 * GIGA
NVLINK2, NVLINK3, NVLINK4, NVLINK5 = 300 * GIGA, 600 * GIGA, 900 * GIGA, 1800 * GIGA
BRIDGE = 112.5 * GIGA

# fmt: off
DEVICES: tuple[Device, ...] = (
    # Blackwell
    Device(("NVIDIA B200",), "SXM", 180, 8000 * GIGA,
           _tera(float64=37, float64_tensor=37, float32=75, tf32=1125, bfloat16=2250, float16=2250,
                 float8=4500, int8=4500, float4=9000),
           "NVLink 5", NVLINK5, PCIE5, 1000,
           "NVIDIA HGX B200 specifications and DGX B200 datasheet, 2024-2025"),
    Device(("NVIDIA GB200",), "superchip", 186, 8000 * GIGA,
           _tera(float64=40, float64_tensor=40, float32=80, tf32=1250, bfloat16=2500, float16=2500,
                 float8=5000, int8=5000, float4=10000),
           "NVLink 5", NVLINK5, C2C, 1200, "NVIDIA GB200 NVL72 datasheet, 2024 (half of a superchip)"),
    Device(("NVIDIA GeForce RTX 5090",), "PCIe", 32, 1792 * GIGA,
           _tera(float32=104.8, tf32=104.8, bfloat16=209.5, float16=209.5, float8=419, int8=838, float4=1676),
           "PCIe 5.0 x16", 2 * PCIE5, PCIE5, 575,
           "NVIDIA RTX Blackwell GPU Architecture white paper, 2025", HALF_RATE),
    # Hopper
    Device(("NVIDIA H200",), "SXM", 141, 4800 * GIGA, HOPPER_SXM,
           "NVLink 4", NVLINK4, PCIE5, 700, "NVIDIA H200 datasheet, 2024"),
    Device(("NVIDIA H200 NVL",), "NVL", 141, 4800 * GIGA, HOPPER_NVL,
           "NVLink 4 bridge", NVLINK4, PCIE5, 600, "NVIDIA H200 datasheet, 2024"),
    Device(("NVIDIA H100 80GB HBM3",), "SXM", 80, 3350 * GIGA, HOPPER_SXM,
           "NVLink 4", NVLINK4, PCIE5, 700, "NVIDIA H100 datasheet, 2024"),
    Device(("NVIDIA H100 NVL",), "NVL", 94, 3900 * GIGA, HOPPER_NVL,
           "NVLink 4 bridge", NVLINK3, PCIE5, 400, "NVIDIA H100 datasheet, 2024"),
    Device(("NVIDIA H100 PCIe",), "PCIe", 80, 2039 * GIGA,
           _tera(float64=25.6, float64_tensor=51.2, float32=51.2, tf32=378, bfloat16=756, float16=756,
                 float8=1513, int8=1513),
           "NVLink 4 bridge", NVLINK3, PCIE5, 350,
           "NVIDIA H100 PCIe product brief and H100 datasheet, 2022-2023"),
    Device(("NVIDIA H800",), "SXM", 80, 3350 * GIGA,
           {**HOPPER_SXM, "float64": 1 * TERA, "float64_tensor": 1 * TERA},
           "NVLink 4", 400 * GIGA, PCIE5, 700, "NVIDIA H800 datasheet, 2023"),
    Device(("NVIDIA H20",), "SXM", 96, 4000 * GIGA,
           _tera(float64=1, float64_tensor=1, float32=44, tf32=74, bfloat16=148, float16=148, float8=296,
                 int8=296),
           "NVLink 4", NVLINK4, PCIE5, 400, "NVIDIA H20 datasheet, 2023"),
    Device(("NVIDIA GH200 480GB",), "superchip", 96, 4000 * GIGA, HOPPER_SXM,
           "NVLink 4", NVLINK4, C2C, 900, "NVIDIA GH200 Grace Hopper Superchip datasheet, 2024"),
    Device(("NVIDIA GH200 144G HBM3e",), "superchip", 144, 4900 * GIGA, HOPPER_SXM,
           "NVLink 4", NVLINK4, C2C, 900, "NVIDIA GH200 Grace Hopper Superchip datasheet, 2024"),
    # Ada
    Device(("NVIDIA L40S",), "PCIe", 48, 864 * GIGA,
           _tera(float32=91.6, tf32=183, bfloat16=362.05, float16=362.05, float8=733, int8=733),
           "PCIe 4.0 x16", 2 * PCIE4, PCIE4, 350, "NVIDIA L40S datasheet, 2023"),
    Device(("NVIDIA L40",), "PCIe", 48, 864 * GIGA,
           _tera(float32=90.5, tf32=90.5, bfloat16=181.05, float16=181.05, float8=362, int8=362),
           "PCIe 4.0 x16", 2 * PCIE4, PCIE4, 300, "NVIDIA L40 datasheet, 2023"),
    Device(("NVIDIA L4",), "PCIe", 24, 300 * GIGA,
           _tera(float32=30.3, tf32=60, bfloat16=121, float16=121, float8=242.5, int8=242.5),
           "PCIe 4.0 x16", 2 * PCIE4, PCIE4, 72, "NVIDIA L4 datasheet, 2023"),
    Device(("NVIDIA GeForce RTX 4090",), "PCIe", 24, 1008 * GIGA,
           _tera(float32=82.6, tf32=82.6, bfloat16=165.2, float16=165.2, float8=330.3, int8=660.6),
           "PCIe 4.0 x16", 2 * PCIE4, PCIE4, 450, "NVIDIA Ada GPU Architecture white paper, appendix A, 2022",
           HALF_RATE),
    # Ampere
    Device(("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"), "SXM", 80, 2039 * GIGA, AMPERE_100,
           "NVLink 3", NVLINK3, PCIE4, 400, "NVIDIA A100 datasheet, 2021"),
    Device(("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"), "SXM", 40, 1555 * GIGA, AMPERE_100,
           "NVLink 3", NVLINK3, PCIE4, 400, "NVIDIA A100 datasheet, 2020"),
    Device(("NVIDIA A100 80GB PCIe",), "PCIe", 80, 1935 * GIGA, AMPERE_100,
           "NVLink 3 bridge", NVLINK3, PCIE4, 300, "NVIDIA A100 datasheet, 2021"),
    Device(("NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB"), "PCIe", 40, 1555 * GIGA, AMPERE_100,
           "NVLink 3 bridge", NVLINK3, PCIE4, 250, "NVIDIA A100 datasheet, 2020"),
    Device(("NVIDIA A800-SXM4-80GB",), "SXM", 80, 2039 * GIGA, AMPERE_100,
           "NVLink 3", 400 * GIGA, PCIE4, 400, "NVIDIA A800 datasheet, 2022"),
    Device(("NVIDIA A40",), "PCIe", 48, 696 * GIGA,
           _tera(float32=37.4, tf32=74.8, bfloat16=149.7, float16=149.7, int8=299.3),
           "NVLink 3 bridge", BRIDGE, PCIE4, 300, "NVIDIA A40 datasheet, 2021"),
    Device(("NVIDIA A10",), "PCIe", 24, 600 * GIGA,
           _tera(float32=31.2, tf32=62.5, bfloat16=125, float16=125, int8=250),
           "PCIe 4.0 x16", 2 * PCIE4, PCIE4, 150, "NVIDIA A10 datasheet, 2021"),
    Device(("NVIDIA A10G",), "PCIe", 24, 600 * GIGA,
           _tera(float32=35, tf32=35, bfloat16=70, float16=70, int8=140),
           "PCIe 4.0 x16", 2 * PCIE4, PCIE4, 300,
           "NVIDIA A10G datasheet as published for Amazon EC2 G5, 2021"),
    Device(("NVIDIA GeForce RTX 3090", "GeForce RTX 3090"), "PCIe", 24, 936 * GIGA,
           _tera(float32=35.6, tf32=35.6, bfloat16=71, float16=71, int8=284),
           "NVLink 3 bridge", BRIDGE, PCIE4, 350, "NVIDIA Ampere GA102 GPU Architecture white paper, 2021",
           HALF_RATE),
    # Turing and Volta
    Device(("Tesla T4",), "PCIe", 16, 320 * GIGA, _tera(float32=8.1, float16=65, int8=130),
           "PCIe 3.0 x16", 2 * PCIE3, PCIE3, 70, "NVIDIA T4 datasheet, 2019",
           "no bfloat16 matrix units"),
    Device(("Tesla V100-SXM2-32GB",), "SXM", 32, 900 * GIGA,
           _tera(float64=7.8, float32=15.7, float16=125),
           "NVLink 2", NVLINK2, PCIE3, 300, "NVIDIA V100 datasheet, 2020"),
    Device(("Tesla V100-SXM2-16GB",), "SXM", 16, 900 * GIGA,
           _tera(float64=7.8, float32=15.7, float16=125),
           "NVLink 2", NVLINK2, PCIE3, 300, "NVIDIA V100 datasheet, 2020"),
    Device(("Tesla V100-PCIE-32GB",), "PCIe", 32, 900 * GIGA,
           _tera(float64=7, float32=14, float16=112),
           "PCIe 3.0 x16", 2 * PCIE3, PCIE3, 250, "NVIDIA V100 datasheet, 2020"),
    Device(("Tesla V100-PCIE-16GB",), "PCIe", 16, 900 * GIGA,
           _tera(float64=7, float32=14, float16=112),
           "PCIe 3.0 x16", 2 * PCIE3, PCIE3, 250, "NVIDIA V100 datasheet, 2020"),
    # AMD
    Device(("AMD Instinct MI300X", "AMD Instinct MI300X OAM"), "OAM", 192, 5300 * GIGA,
           _tera(float64=81.7, float64_tensor=163.4, float32=163.4, tf32=653.7, bfloat16=1307.4,
                 float16=1307.4, float8=2614.9, int8=2614.9),
           "Infinity Fabric", 896 * GIGA, PCIE5, 750, "AMD Instinct MI300X data sheet, 2023"),
)
# fmt: on
