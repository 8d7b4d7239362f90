"""The rooms import one another in one direction only, and what the wheel promises is in it."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "impls": {"impls", "kernels", "harness"},
    "suites": {"suites", "harness"},
    "harness": {"harness"},
    "dashboard": {"dashboard", "harness"},
}
#: The declarations that impls may use; the rest of the harness runs them and is none of their business.
DECLARATIONS = {"pair", "workload", "errors", "serving"}
NO_TORCH = ("harness/record.py", "harness/stats.py", "harness/history", "harness/regress", "dashboard", "suites")


def _imports(path: Path, everywhere: bool = True) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else tree.body
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
    return found


def _files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    wrong = []
    for path in _files(room):
        for line, name in _imports(path):
            top, _, rest = name.partition(".")
            if top in MAY_IMPORT and top not in MAY_IMPORT[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
            if room == "impls" and top == "harness" and rest.split(".")[0] not in DECLARATIONS:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {name}")
    assert not wrong, "\n".join(wrong)


def test_kernels_know_torch_and_triton_and_nothing_else() -> None:
    known = {"torch", "triton", "kernels", *sys.stdlib_module_names}
    wrong = [f"{p.name}: {n}" for p in _files("kernels") for _, n in _imports(p) if n.partition(".")[0] not in known]
    assert not wrong, wrong


@pytest.mark.parametrize("part", NO_TORCH)
def test_what_reads_history_imports_no_torch(part: str) -> None:
    path = ROOT / part
    files = [path] if path.suffix else sorted(path.rglob("*.py"))
    wrong = [
        f"{f.relative_to(ROOT)}:{line}" for f in files for line, n in _imports(f) if n.partition(".")[0] == "torch"
    ]
    assert files
    assert not wrong, wrong


def test_the_kernels_package_keeps_no_version() -> None:
    import kernels

    assert not hasattr(kernels, "__version__")
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"].startswith("0.1.")


def test_no_top_level_room_is_missing_from_the_wheel() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {n for n in named if "." not in n} == set(MAY_IMPORT)
    for room in MAY_IMPORT:
        for folder in {p.parent for p in _files(room)}:
            assert (folder / "__init__.py").exists(), f"{folder.relative_to(ROOT)} lacks __init__.py"


def test_transformers_imports_beside_us() -> None:
    pytest.importorskip("transformers")
    code = "import kernels, transformers; from transformers import LlamaConfig; LlamaConfig()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
