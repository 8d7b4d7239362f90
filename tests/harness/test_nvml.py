"""NVML asked through a stand-in for its Python module: what is missing is None, never a crash."""

from types import SimpleNamespace

import pytest

from harness.nvml import (
    GpuIdentity,
    GpuSample,
    NoNvml,
    PyNvml,
    match_torch_device,
    normal_pci,
    open_nvml,
    visible_gpus,
)


class NVMLError(Exception):
    pass


def fake_pynvml(**changes):
    """A module as nvidia-ml-py gives it, of a machine with one H200; ``changes`` replaces or (None) removes."""

    def unsupported(*_args):
        raise NVMLError("Not Supported")

    functions = {
        "nvmlInit": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.159.03",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13010,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _h: SimpleNamespace(total=143771 << 20, used=5 << 20),
        "nvmlDeviceGetEnforcedPowerLimit": lambda _h: 700_000,
        "nvmlDeviceGetPciInfo": lambda _h: SimpleNamespace(busId=b"00000000:1B:00.0"),
        "nvmlDeviceGetMigMode": lambda _h: [0, 0],
        "nvmlDeviceGetEccMode": lambda _h: [1, 1],
        "nvmlDeviceGetUUID": lambda _h: "GPU-aa",
        "nvmlDeviceGetName": lambda _h: b"NVIDIA H200",
        "nvmlDeviceGetPowerUsage": lambda _h: 512_250,
        "nvmlDeviceGetTotalEnergyConsumption": lambda _h: 2_000_500,
        "nvmlDeviceGetUtilizationRates": lambda _h: SimpleNamespace(gpu=97),
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _h: 4,
        "nvmlDeviceGetClockInfo": lambda _h, which: {1: 1980, 2: 3201}[which],
        "nvmlDeviceGetTemperature": lambda _h, _which: 61,
        "nvmlDeviceGetComputeRunningProcesses": lambda _h: [SimpleNamespace(pid=7, usedGpuMemory=None)],
        "nvmlDeviceGetGraphicsRunningProcesses": unsupported,
    }
    functions.update(changes)
    present = {name: fn or unsupported for name, fn in functions.items()}
    return SimpleNamespace(NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, **present)


def test_an_h200_as_nvml_shows_it():
    nvml = open_nvml(fake_pynvml)
    assert isinstance(nvml, PyNvml)
    assert nvml.driver() == "580.159.03"
    assert nvml.cuda() == "13.1"
    (gpu,) = nvml.gpus()
    assert gpu == GpuIdentity(0, "GPU-aa", "0000:1b:00.0", "NVIDIA H200", 143771 << 20, 700.0, False, True)
    sample = nvml.sample(0)
    assert (sample.sm_mhz, sample.memory_mhz, sample.temperature_c, sample.power_w) == (1980, 3201, 61, 512.25)
    assert (sample.energy_j, sample.reasons, sample.utilization) == (2000.5, 4, 97)
    assert [p.pid for p in sample.processes or ()] == [7]


def test_what_a_board_does_not_support_is_none():
    nvml = open_nvml(
        lambda: fake_pynvml(
            nvmlDeviceGetTotalEnergyConsumption=None,
            nvmlDeviceGetMigMode=None,
            nvmlDeviceGetEccMode=None,
            nvmlDeviceGetComputeRunningProcesses=None,
            nvmlDeviceGetEnforcedPowerLimit=None,
        )
    )
    assert isinstance(nvml, PyNvml)
    sample = nvml.sample(0)
    assert sample.energy_j is None
    assert sample.processes is None
    gpu = nvml.gpus()[0]
    assert (gpu.mig, gpu.ecc, gpu.power_limit_w) == (False, None, None)


def test_a_gpu_that_fell_off_the_bus_is_passed_over():
    def handle(index):
        if index == 0:
            raise NVMLError("GPU is lost")
        return index

    nvml = open_nvml(lambda: fake_pynvml(nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=handle))
    assert isinstance(nvml, PyNvml)
    assert [g.index for g in nvml.gpus()] == [1]
    assert nvml.sample(0) == GpuSample()


def test_an_older_driver_knows_the_reasons_by_their_old_name():
    nvml = open_nvml(
        lambda: fake_pynvml(
            nvmlDeviceGetCurrentClocksEventReasons=None, nvmlDeviceGetCurrentClocksThrottleReasons=lambda _h: 64
        )
    )
    assert isinstance(nvml, PyNvml)
    assert nvml.sample(0).reasons == 64


def test_no_package_and_no_driver_give_the_reason():
    def missing():
        raise ImportError("no pynvml")

    def no_driver():
        raise NVMLError("Driver Not Loaded")

    assert "nvidia-ml-py" in open_nvml(missing).reason
    found = open_nvml(lambda: fake_pynvml(nvmlInit=no_driver))
    assert isinstance(found, NoNvml)
    assert "Driver Not Loaded" in found.reason


def gpu(index, name="NVIDIA H200"):
    return GpuIdentity(index, f"GPU-{index:08x}", f"0000:{0x10 + index:02x}:00.0", name, 143771 << 20)


EQUAL = [gpu(0), gpu(1), gpu(2)]
MIXED = [gpu(0), gpu(1, "NVIDIA L4")]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        ("-1", []),
        ("0,7,1", [0]),
        ("GPU-00000001", [1]),
        ("GPU-0000000", []),
        (" 1 , 1", [1]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices(value, indices):
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    chosen, doubt = visible_gpus(EQUAL, env)
    assert [g.index for g in chosen] == indices
    assert doubt is None


def test_indices_on_a_mixed_host_are_doubtful_unless_in_pci_order():
    assert match_torch_device(0, MIXED, environ={})[0] is None
    assert "CUDA_DEVICE_ORDER" in (match_torch_device(0, MIXED, environ={})[1] or "")
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}
    assert match_torch_device(0, MIXED, environ=env)[0] == MIXED[1]
    assert match_torch_device(0, MIXED, environ={"CUDA_VISIBLE_DEVICES": "GPU-00000001"})[0] == MIXED[1]


def test_a_mig_slice_is_no_gpu_of_ours():
    found, why = match_torch_device(0, EQUAL, environ={"CUDA_VISIBLE_DEVICES": "MIG-abc"})
    assert found is None
    assert "MIG" in (why or "")


def test_torch_properties_decide_by_uuid_then_by_pci_address():
    by_uuid = SimpleNamespace(uuid="00000002", pci_bus_id=0x10, pci_domain_id=0, pci_device_id=0)
    assert match_torch_device(0, EQUAL, by_uuid, {})[0] == EQUAL[2]
    by_pci = SimpleNamespace(pci_bus_id=0x11, pci_domain_id=0, pci_device_id=0)
    assert match_torch_device(0, MIXED, by_pci, {})[0] == MIXED[1]
    stranger = SimpleNamespace(uuid="ffffffff", pci_bus_id=0x77, pci_domain_id=0, pci_device_id=0)
    assert match_torch_device(0, EQUAL, stranger, {})[0] is None


def test_an_index_beyond_the_visible_gpus_is_named():
    assert "cuda:3" in (match_torch_device(3, EQUAL, environ={})[1] or "")


def test_pci_addresses_compare_whatever_their_padding():
    assert normal_pci("00000000:1B:00.0\0") == normal_pci("0000:1b:00.0") == "0000:1b:00.0"
