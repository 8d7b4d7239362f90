"""Where a record comes from: commit, machine, stack, environment and CI job. Imports no torch by itself.

:func:`provenance` gives a plain mapping of JSON values, its keys stable:

``commit`` (40 digits or None), ``branch``, ``dirty``, ``commit_date`` (committer's, UTC), ``commit_subject``,
``commit_source`` (``git``, ``files``, ``asv``, ``declared``, ``none``), ``declared``, ``commit_reason`` (why not git),
``shallow``, ``changed`` (what makes it dirty); ``gpu`` (file-safe type, a CPU's model on a CPU), ``machine`` (label);

===========  ===========================================================================================
``stack``    ``python``, ``torch``, ``cuda``, ``cudnn``, ``cublas``, ``triton``, ``nccl``, ``driver``, ``numpy`` and
             peer packages by name: versions as text; what is not there has no key
``host``     ``device`` (``cpu`` or ``cuda``), ``cpu``, ``cores``, ``memory_bytes``, ``os``, ``gpu_name``,
             ``gpu_count`` (visible), ``gpu_memory_bytes``, ``gpu_uuid``, ``power_limit_w``, ``gpu_mig`` (only when
             true), ``gpu_reason`` (why NVML does not know it)
``env``      the allowed environment variables that are set
``ci``       ``system``, ``url`` and ``job``; empty outside CI
===========  ===========================================================================================
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from harness.devices import gpu_slug, is_mig
from harness.gitfacts import git_facts
from harness.hostfacts import cores_allowed, cpu_model, machine_label, memory_bytes
from harness.nvml import NoNvml, Nvml, match_torch_device, open_nvml, torch_properties, visible_gpus

#: key of ``stack`` → distributions that may carry it, the likelier first. No package is imported to read these.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "pytorch-triton-rocm"),
    "numpy": ("numpy",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cublas": ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "liger_kernel": ("liger-kernel",),
    "flashinfer": ("flashinfer-python", "flashinfer"),
    "flash_attn": ("flash-attn",),
    "torchao": ("torchao",),
    "transformers": ("transformers",),
    "vllm": ("vllm",),
    "pairbench": ("pairbench",),
}

_ENV_ALLOWED = re.compile(
    r"(?:CUDA|CUBLAS|CUDNN|NCCL|NVIDIA_TF32|TORCH|TORCHINDUCTOR|TORCHDYNAMO|PYTORCH|TRITON|OMP|MKL|KMP|GOMP|GLOO)(?:_\w+)?"
    r"|MALLOC_ARENA_MAX|PYTHONHASHSEED"
)
# Ids that differ from run to run would make every two runs look different; the rest might carry a secret.
_ENV_REFUSED = re.compile(
    r"RUN_ID|RESTART_COUNT|_ERROR_FILE|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|APIKEY|(?:^|_)KEY(?:_|$)"
)
ENV_MAX = 200


def provenance(
    device: str = "cpu",
    *,
    root: Path | None = None,
    environ: Mapping[str, str] | None = None,
    nvml: Nvml | NoNvml | None = None,
    ask_torch: bool = False,
) -> dict[str, Any]:
    """Where a record made now on ``device`` (``cpu``, ``cuda`` or ``cuda:N``) comes from; keys as above.

    Args:
        ask_torch: import torch for CUDA's and its libraries' versions; otherwise torch is asked only when it is
            already imported, and package metadata answers. A CUDA context is made only when this is set, the device
            is a GPU and NVML cannot name it.
    """
    env = os.environ if environ is None else environ
    git = git_facts(root, env)
    backend = open_nvml() if nvml is None else nvml
    stack = versions(backend, ask_torch=ask_torch)
    host = host_facts(device, env, backend, ask_torch=ask_torch)
    return {
        "commit": git.commit,
        "branch": git.branch,
        "dirty": git.dirty,
        "commit_date": git.commit_date,
        "commit_subject": git.subject,
        "commit_source": git.source,
        "declared": git.declared,
        "commit_reason": git.reason,
        "shallow": git.shallow,
        "changed": list(git.changed),
        "gpu": gpu_slug(host.get("gpu_name") or ("unknown gpu" if host["device"] == "cuda" else host["cpu"])),
        "machine": machine_label(env),
        "stack": stack,
        "host": host,
        "env": environment(env),
        "ci": ci_job(env),
    }


def host_facts(
    device: str, environ: Mapping[str, str], nvml: Nvml | NoNvml, *, ask_torch: bool = False
) -> dict[str, Any]:
    """CPU and memory, and for a GPU its name, count, memory and power limit by NVML, else by torch if imported."""
    kind, _, index = device.partition(":")
    facts: dict[str, Any] = {
        "device": kind,
        "cpu": cpu_model(),
        "cores": cores_allowed(),
        "memory_bytes": memory_bytes(),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if kind == "cuda":
        facts.update(_gpu_facts(int(index or 0), environ, nvml, ask_torch))
    return facts


def _gpu_facts(index: int, environ: Mapping[str, str], nvml: Nvml | NoNvml, ask_torch: bool) -> dict[str, Any]:
    torch: Any = sys.modules.get("torch")
    available = torch is not None and torch.cuda.is_available()
    properties = torch_properties(index)
    reason: str | None
    if isinstance(nvml, NoNvml):
        reason = nvml.reason
    else:
        gpus = nvml.gpus()
        gpu, reason = match_torch_device(index, gpus, properties, environ)
        if gpu is not None:
            # A card split by MIG is no longer the card of its datasheet: its name says so, and so does its type.
            name = f"{gpu.name} MIG" if gpu.mig and not is_mig(gpu.name) else gpu.name
            return {
                "gpu_name": name,
                "gpu_count": len(visible_gpus(gpus, environ)[0]),
                "gpu_memory_bytes": gpu.memory_bytes,
                "gpu_uuid": gpu.uuid,
                "power_limit_w": gpu.power_limit_w,
            }
    if available and ask_torch and properties is None:
        properties = torch.cuda.get_device_properties(index)
    if properties is not None:
        return {
            "gpu_name": str(properties.name),
            "gpu_count": int(torch.cuda.device_count()),
            "gpu_memory_bytes": int(properties.total_memory),
            "gpu_reason": reason,
        }
    return {"gpu_reason": reason}


def versions(nvml: Nvml | NoNvml | None = None, *, ask_torch: bool = False) -> dict[str, str]:
    """Versions of what decides a number, by the keys of ``stack``; what is not there has no key."""
    found = {"python": f"{platform.python_version()} {platform.python_implementation()}"}
    for key, names in DISTRIBUTIONS.items():
        for name in names:
            version = _installed(name)
            if version is not None:
                found[key] = version
                break
    if ask_torch:
        import torch  # noqa: F401
    found.update(_torch_versions())
    if nvml is not None and not isinstance(nvml, NoNvml) and (driver := nvml.driver()):
        found["driver"] = driver
    return found


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _torch_versions() -> dict[str, str]:
    """What torch itself says: the libraries it loads may not be the wheels beside it.

    Where it is not imported its version file is read, so that a machine has one name for its torch: the package's
    metadata leaves out the build (2.13.0 for 2.13.0+cu130).
    """
    torch: Any = sys.modules.get("torch")
    found: dict[str, str] = {}
    if torch is None or not hasattr(torch, "version"):
        return _torch_file_versions()
    found["torch"] = str(torch.__version__)
    if torch.version.cuda:
        found["cuda"] = str(torch.version.cuda)
    if getattr(torch.version, "hip", None):
        found["hip"] = str(torch.version.hip)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if cudnn:
        # 91002 is 9.10.2 since cuDNN 9; before, 8907 was 8.9.7
        scale = 10_000 if cudnn >= 90_000 else 1_000
        found["cudnn"] = f"{cudnn // scale}.{cudnn % scale // 100}.{cudnn % 100}"
    if hasattr(torch._C, "_nccl_version"):
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def _torch_file_versions() -> dict[str, str]:
    spec = importlib.util.find_spec("torch")
    version = None if spec is None or spec.origin is None else Path(spec.origin).parent / "version.py"
    try:
        text = version.read_text() if version is not None else ""
    except OSError:
        return {}
    wanted = {"__version__": "torch", "cuda": "cuda", "hip": "hip"}
    pairs = re.findall(r"^(\w+)\b[^=\n]*=\s*['\"]([^'\"]+)['\"]\s*$", text, flags=re.MULTILINE)
    return {wanted[name]: value for name, value in pairs if name in wanted}


def environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables that can change a number, by an allow-list of prefixes.

    Names that look like a secret or change with every run are left out, so is a value with a password in a URL; a
    path of this machine becomes ``(path)``: that it was set matters, where it points does not.
    """
    env = os.environ if environ is None else environ
    kept: dict[str, str] = {}
    for name in sorted(env):
        if not _ENV_ALLOWED.fullmatch(name) or _ENV_REFUSED.search(name):
            continue
        value = env[name]
        if re.search(r"://[^/\s]*@", value):
            continue
        if value.startswith(("/", "~")):
            value = "(path)"
        kept[name] = value[:ENV_MAX]
    return kept


def ci_job(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The CI job this runs in: ``system``, ``url`` where it can be known, ``job``; empty outside CI."""
    env = os.environ if environ is None else environ
    if env.get("GITHUB_ACTIONS") == "true":
        base = f"{env.get('GITHUB_SERVER_URL', 'https://github.com')}/{env.get('GITHUB_REPOSITORY', '')}"
        url = f"{base}/actions/runs/{env.get('GITHUB_RUN_ID', '')}/attempts/{env.get('GITHUB_RUN_ATTEMPT', '1')}"
        job = {"system": "github", "url": url, "job": env.get("GITHUB_JOB", "")}
    elif env.get("GITLAB_CI"):
        job = {"system": "gitlab", "url": env.get("CI_JOB_URL", ""), "job": env.get("CI_JOB_NAME", "")}
    elif env.get("BUILDKITE"):
        url = f"{env.get('BUILDKITE_BUILD_URL', '')}#{env.get('BUILDKITE_JOB_ID', '')}"
        job = {"system": "buildkite", "url": url, "job": env.get("BUILDKITE_LABEL", "")}
    elif env.get("JENKINS_URL"):
        job = {"system": "jenkins", "url": env.get("BUILD_URL", ""), "job": env.get("JOB_NAME", "")}
    elif env.get("PAIRBENCH_CI_URL"):
        job = {"system": "other", "url": "", "job": ""}
    elif env.get("CI"):
        return {"system": "unknown"}
    else:
        return {}
    job["url"] = _without_login(env.get("PAIRBENCH_CI_URL") or job["url"])
    return {key: value for key, value in job.items() if value.strip("#")}


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    host = parts.netloc.rsplit("@", 1)[-1]
    return urlunsplit((parts.scheme, host, parts.path, parts.query, parts.fragment))
