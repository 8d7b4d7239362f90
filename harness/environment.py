"""What the Makefile asks about an environment where the user brings a torch of his own. Standard library only.

``python -m harness.environment constraints IN OUT``  the constraints without torch and Triton, and instead with those
                                                     that are installed, so that pip puts no other in their place
``python -m harness.environment borrow PYTHON``      this environment sees the packages of PYTHON's environment, too

A virtual environment made from a virtual environment's Python sees the packages of neither: ``--system-site-packages``
means those of the Python that both were made from.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path

#: What the user brings.
BROUGHT = ("torch", "triton")
#: torch → the Triton that it was built and tested with, where its metadata does not say (CPU builds).
TRITON_OF: dict[tuple[int, int], tuple[int, int]] = {(2, 11): (3, 6), (2, 13): (3, 7)}
#: Where a borrowing environment keeps whose packages it sees.
BORROWED = "pairbench_borrowed.pth"
_ASK = (
    "import json, os, sys; is_site = lambda p: os.path.basename(p) in ('site-packages', 'dist-packages');"
    "print(json.dumps([sys.prefix != sys.base_prefix, [p for p in sys.path if is_site(p) and os.path.isdir(p)]]))"
)


def constraints(lines: Iterable[str], installed: Mapping[str, str], torch_wants: str | None = None) -> Iterator[str]:
    """The constraints for an environment that holds a torch that the user brought.

    Args:
        lines: of the file of constraints.
        installed: versions by name, of torch and Triton.
        torch_wants: the exact Triton that this torch requires, if its metadata says so.
    """
    for line in lines:
        begins = re.match(r"\s*([A-Za-z0-9._-]*)", line)
        if begins is None or begins[1].lower() not in BROUGHT:
            yield line.rstrip("\n")
    for name in BROUGHT:
        if name in installed:
            yield f"{name}=={installed[name]}"
    if "triton" not in installed and "torch" in installed:
        found = re.match(r"(\d+)\.(\d+)", installed["torch"])
        near = TRITON_OF.get((int(found[1]), int(found[2]))) if found else None
        wanted = torch_wants or (f"{near[0]}.{near[1]}.*" if near else None)
        if wanted is not None:
            yield f"triton=={wanted}; sys_platform == 'linux'"


def pinned(distribution: str, needs: str) -> str | None:
    """The exact version of ``needs`` that a distribution requires, if it pins one."""
    try:
        requirements = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        match = re.match(rf"{needs}\s*\(?==\s*([\w.]+)", requirement)
        if match:
            return match[1]
    return None


def borrow(python: str, site: Path | None = None) -> list[str]:
    """Makes this environment see the packages of another virtual environment's Python, after its own.

    A Python that is in no virtual environment needs none of that: its packages are the system's. The file of paths is
    one that Python reads at its start; what the other environment's own such files add is added, too.

    Args:
        python: the other one.
        site: the folder of packages of this environment, where it is not the running one's.

    Returns: the folders that are seen from now on.
    """
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=True, timeout=60)
    in_venv, folders = json.loads(done.stdout)
    if not in_venv:
        return []
    target = site if site is not None else Path(sysconfig.get_paths()["purelib"])
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
    (target / BORROWED).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return list(folders)


def main(arguments: list[str]) -> None:
    """One of the two commands above."""
    if arguments[0] == "borrow":
        borrow(arguments[1])
        return
    _, source, target = arguments
    installed: dict[str, str] = {}
    for name in BROUGHT:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    lines = Path(source).read_text(encoding="utf-8").splitlines()
    made = constraints(lines, installed, pinned("torch", "triton"))
    Path(target).write_text("\n".join(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
