"""Digests of what a workload only names (model, trace, text), so that a changed file starts a new series.

They do not depend on where the file lies. Large files are sampled: every size, and the two ends of each file.
"""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import replace
from pathlib import Path

from harness.errors import UsageError
from harness.plan import Item

SAMPLE_BYTES = 1 << 20
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


def text_digest() -> str:
    """The digest of the text that language-model workloads read; it differs between Python versions."""
    digest: str = importlib.import_module("impls.model.text").real_text().digest
    return digest


def set_digests(item: Item, model: str | None, trace: str | None) -> Item:
    """The item with ``digests`` set on every workload that names a model file, a trace file or a text."""
    workloads = []
    for workload in item.workloads:
        found: dict[str, str] = {}
        for key, path in (("model", model), ("trace", trace)):
            if key in workload.dims and path is not None:
                found[key] = file_digest(Path(path).expanduser())
        if "text" in workload.dims:
            found["text"] = text_digest()
        workloads.append(replace(workload, digests=found) if found else workload)
    return replace(item, workloads=tuple(workloads))
