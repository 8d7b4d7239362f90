"""Digests of what a workload only names (model, trace, text), so that a changed file starts a new series.

They do not depend on where the file lies. Large files are sampled: every size, and the two ends of each file.
"""

from __future__ import annotations

import hashlib
import importlib
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

from harness.errors import UsageError
from harness.plan import Item
from harness.serving.sweep import RATE
from harness.serving.workload_trace import SYNTHETIC, trace_for

SAMPLE_BYTES = 1 << 20
LOOK_LIMIT_S = 60.0
_ROOT = Path(__file__).resolve().parent.parent
MODEL_FILES = ("*.safetensors", "*.gguf", "*.json")


def file_digest(path: Path) -> str:
    """16 hex digits of one file, or of the weight and configuration files of a folder.

    Raises:
        UsageError: the path does not exist, or the folder holds no such file.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    files = [path] if path.is_file() else sorted({f for g in MODEL_FILES for f in path.glob(g)})
    if not files:
        raise UsageError(f"{path} holds no *.safetensors, *.gguf or *.json file")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else file.suffix} {size}\n".encode())
        with open(file, "rb") as stream:
            digest.update(stream.read(SAMPLE_BYTES))
            if size > SAMPLE_BYTES:
                stream.seek(max(SAMPLE_BYTES, size - SAMPLE_BYTES))
                digest.update(stream.read())
    return digest.hexdigest()[:16]


@cache
def refuse_unreadable(model: str) -> None:
    """Looks at the headers of a model before anything is measured, in a process of its own: this one imports no torch.

    A look that fails for another reason than the model refuses nothing: the measurement itself will tell.

    Raises:
        UsageError: a tensor is missing, misshapen or cut off, or the file is of no known form; both are named.
    """
    command = [sys.executable, "-m", "impls.model.weights", model]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=LOOK_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return
    said = done.stderr.strip().splitlines()
    mark = "ModelError: "
    if done.returncode != 0 and said and said[-1].startswith(mark):
        raise UsageError(f"--model {said[-1].removeprefix(mark)}")


def text_digest() -> str:
    """The digest of the text that language-model workloads read; it differs between Python versions."""
    digest: str = importlib.import_module("impls.model.text").real_text().digest
    return digest


def set_digests(item: Item, model: str | None, trace: str | None) -> Item:
    """The item with ``digests`` set on every workload that names a model file, a trace file, a text or a rate of
    synthetic requests.

    Raises:
        UsageError: such a file does not exist, our own techniques cannot read the model, or a rate that makes no load.
    """
    workloads = []
    for workload in item.workloads:
        found: dict[str, str] = {}
        for key, path in (("model", model), ("trace", trace)):
            if key in workload.dims and path is not None:
                found[key] = file_digest(Path(path).expanduser())
                if key == "model" and item.technique.family != "external":
                    refuse_unreadable(str(Path(path).expanduser().absolute()))
        if trace is None and workload.dims.get("trace") == SYNTHETIC and workload.dims.get(RATE):
            # When requests come is drawn, and belongs to the load: drawn otherwise it is another one.
            found["arrivals"] = trace_for(workload).digest
        if "text" in workload.dims:
            found["text"] = text_digest()
        workloads.append(replace(workload, digests=found) if found else workload)
    return replace(item, workloads=tuple(workloads))
