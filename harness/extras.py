"""The extras of pyproject.toml: what each is for, and the modules by which it is known to be here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extra:
    """An extra: what it brings, and the modules of its own (those of the extras it includes are theirs)."""

    purpose: str
    modules: tuple[str, ...]


EXTRAS = {
    "models": Extra("techniques on real weights", ("safetensors", "tokenizers", "gguf")),
    "history": Extra(
        "regressions, compare, bisect, detect and compaction", ("duckdb", "pyarrow", "ruptures", "fsspec")
    ),
    "s3": Extra("stores in an object store", ("s3fs",)),
    "asv": Extra("asv", ("asv", "virtualenv", "setuptools", "wheel")),
    "dashboard": Extra("the dashboard and the report", ("streamlit", "pandas", "plotly")),
    "dev": Extra(
        "changing pairbench itself",
        (
            "pytest",
            "pytest_benchmark",
            "pytest_timeout",
            "xdist",
            "hypothesis",
            "mypy",
            "ruff",
            "pre_commit",
            "transformers",
            "accelerate",
            "moto",
            "playwright",
        ),
    ),
}
#: What pairbench itself requires.
CORE = ("torch", "triton", "numpy", "typer", "rich", "pynvml")


def install(extra: str) -> str:
    """The command that brings an extra."""
    return f"pip install 'pairbench[{extra}]' (in a checkout: '.[{extra}]')"


def brings(module: str) -> str | None:
    """The command that brings a module, or None when no extra does."""
    top = module.partition(".")[0]
    if top in CORE:
        return "pip install pairbench (in a checkout: .)"
    return next((install(name) for name, extra in EXTRAS.items() if top in extra.modules), None)
