"""Provenance is plain JSON, complete where it can be, silent about secrets, and imports nothing heavy."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from harness.devices import lookup
from harness.nvml import GpuIdentity, GpuSample, NoNvml
from harness.provenance import ci_job, environment, provenance, versions

NONE = NoNvml("no driver here")


class FakeNvml:
    def __init__(self, *gpus):
        self._gpus = gpus

    def driver(self):
        return "580.159.03"

    def cuda(self):
        return "13.0"

    def gpus(self):
        return list(self._gpus)

    def sample(self, index):
        return GpuSample()


H200 = GpuIdentity(0, "GPU-aa", "0000:1b:00.0", "NVIDIA H200", 143771 << 20, 700.0)
OTHER = GpuIdentity(1, "GPU-bb", "0000:2b:00.0", "NVIDIA H200", 143771 << 20, 650.0)


def test_a_cpu_record_has_the_cpu_model_as_its_gpu_type(tmp_path):
    found = provenance("cpu", root=tmp_path, environ={"PAIRBENCH_MACHINE": "m1"}, nvml=NONE)
    assert found["gpu"]
    assert found["machine"] == "m1"
    assert found["host"]["device"] == "cpu"
    assert found["host"]["cores"] >= 1
    assert "gpu_name" not in found["host"]
    assert found["commit"] is None
    assert found["dirty"] is True
    json.dumps(found, allow_nan=False)


def test_a_gpu_record_names_the_gpu_by_nvml(tmp_path):
    env = {"CUDA_VISIBLE_DEVICES": "0"}
    found = provenance("cuda:0", root=tmp_path, environ=env, nvml=FakeNvml(H200, OTHER))
    assert found["gpu"] == "nvidia-h200"
    host = found["host"]
    assert (host["gpu_name"], host["gpu_count"], host["power_limit_w"]) == ("NVIDIA H200", 1, 700.0)
    assert found["stack"]["driver"] == "580.159.03"
    json.dumps(found, allow_nan=False)


def test_a_card_split_by_mig_has_a_type_of_its_own(tmp_path):
    found = provenance("cuda", root=tmp_path, environ={}, nvml=FakeNvml(replace(H200, mig=True)))
    assert found["gpu"] == "nvidia-h200-mig"
    assert lookup(found["host"]["gpu_name"], found["host"]["gpu_memory_bytes"]).device is None


def test_an_unknown_gpu_says_why(tmp_path):
    found = provenance("cuda", root=tmp_path, environ={}, nvml=NONE)
    assert found["gpu"] == "unknown-gpu"
    assert found["host"]["gpu_reason"] == "no driver here"


def test_the_declared_commit_is_marked(tmp_path):
    env = {"PAIRBENCH_COMMIT": "a" * 40, "PAIRBENCH_BRANCH": "main"}
    found = provenance(root=tmp_path, environ=env, nvml=NONE)
    assert (found["commit"], found["declared"], found["dirty"]) == ("a" * 40, True, False)


def test_versions_are_read_without_importing_what_is_heavy():
    code = (
        "import sys; from harness.provenance import provenance; v = provenance()['stack'];"
        "assert v['torch'] and v['numpy'] and v['python'], v;"
        "bad = {'torch', 'triton', 'transformers', 'numpy'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_that_knows_the_machine_imports_torch_or_pynvml():
    names = (
        "devices gitfacts hostfacts nvml provenance cpu_watch conditions limits metrics machine_store "
        "stopwatch ceilings sentinel doctor doctor_facts"
    )
    imports = "; ".join(f"import harness.{name}" for name in names.split())
    code = f"import sys; {imports}; bad = {{'torch', 'pynvml', 'numpy'}} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_is_asked_when_wanted_and_agrees_with_its_metadata():
    import torch

    found = versions(NONE, ask_torch=True)
    assert found["torch"] == str(torch.__version__)
    assert ("cuda" in found) == bool(torch.version.cuda)
    assert "driver" not in found


def test_torch_has_one_name_whether_it_is_imported_or_not():
    """Ceilings are kept by it: a name that depends on the import would have them measured and not found again."""
    import torch

    code = "import sys; from harness.provenance import versions as v; print(v()['torch'], 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.split() == [str(torch.__version__), "False"]
    assert versions(NONE, ask_torch=True)["torch"] == str(torch.__version__)


def test_only_variables_that_matter_are_kept_and_no_secret():
    kept = environment(
        {
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_ALGO": "Ring",
            "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            "OMP_NUM_THREADS": "2",
            "TRITON_INTERPRET": "1",
            "TORCH_HOME": "/home/someone/.cache",
            "TRITON_REMOTE_CACHE_BACKEND": "redis://user:pass@host/0",
            "TORCH_HUB_TOKEN": "hunter2",
            "NCCL_AUTH": "hunter2",
            "CUDA_API_KEY": "hunter2",
            "TORCHELASTIC_RUN_ID": "1234",
            "AWS_SECRET_ACCESS_KEY": "hunter2",
            "HF_TOKEN": "hunter2",
            "HOME": "/root",
            "NCCL_LONG": "x" * 5000,
        }
    )
    assert "hunter2" not in json.dumps(kept)
    assert set(kept) == {
        "CUDA_VISIBLE_DEVICES",
        "NCCL_ALGO",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "PYTORCH_ALLOC_CONF",
        "OMP_NUM_THREADS",
        "TRITON_INTERPRET",
        "TORCH_HOME",
        "NCCL_LONG",
    }
    assert kept["TORCH_HOME"] == "(path)"
    assert len(kept["NCCL_LONG"]) == 200


@pytest.mark.parametrize(
    ("env", "system", "url"),
    [
        (
            {
                "GITHUB_ACTIONS": "true",
                "GITHUB_SERVER_URL": "https://git.example",
                "GITHUB_REPOSITORY": "o/r",
                "GITHUB_RUN_ID": "42",
                "GITHUB_RUN_ATTEMPT": "2",
            },
            "github",
            "https://git.example/o/r/actions/runs/42/attempts/2",
        ),
        ({"GITLAB_CI": "true", "CI_JOB_URL": "https://x/-/jobs/1"}, "gitlab", "https://x/-/jobs/1"),
        (
            {"BUILDKITE": "true", "BUILDKITE_BUILD_URL": "https://b/o/p/builds/3", "BUILDKITE_JOB_ID": "j"},
            "buildkite",
            "https://b/o/p/builds/3#j",
        ),
        ({"JENKINS_URL": "https://j", "BUILD_URL": "https://me:pw@j/job/1/"}, "jenkins", "https://j/job/1/"),
        ({"PAIRBENCH_CI_URL": "https://ci.example/7"}, "other", "https://ci.example/7"),
        ({"CI": "1"}, "unknown", None),
        ({}, None, None),
    ],
)
def test_ci_jobs(env, system, url):
    job = ci_job(env)
    assert job.get("system") == system
    assert job.get("url") == url
