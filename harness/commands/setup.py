"""``pairbench models fetch`` and ``pairbench new``: real weights, and the start of a technique of one's own."""

from __future__ import annotations

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from harness.commands import options
from harness.errors import UsageError

Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    models = typer.Typer(help="Real weights.", no_args_is_help=True)
    models.command("fetch")(fetch)
    app.add_typer(models, name="models")
    app.command()(new)


def fetch(
    dest: Annotated[Path | None, typer.Option(help="Folder to put them in; your data folder by default.")] = None,
    json: Json = False,
) -> None:
    """Brings SmolLM2-135M-Instruct (93 MB, Apache-2.0) to this machine, once; verified by its digest."""
    try:
        path = importlib.import_module("impls.model.fetch").fetch_models(dest, partial(print, file=sys.stderr))
    except ValueError as err:
        raise UsageError(str(err)) from err
    if json:
        options.print_json({"path": str(path)})
    else:
        print(path)


def new(
    name: Annotated[str, typer.Argument(help="The technique's name: lower case, digits and underscores.")],
    family: Annotated[str, typer.Option(help="The family (folder) it belongs to.")] = "fusion",
    root: Annotated[Path, typer.Option(help="The checkout to write to.")] = Path(),
    json: Json = False,
) -> None:
    """Writes a technique that runs and passes its test as generated: a pair, its workloads, ready to be changed."""
    from harness.commands.template import PAIR_TEMPLATE, SUITE_TEMPLATE
    from harness.discover import taken_by

    for what, value in (("technique", name), ("family", family)):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", value):
            raise UsageError(f"{what} {value!r}: use lower case letters, digits and underscores, a letter first")
    if not (root / "impls").is_dir() or not (root / "suites").is_dir():
        raise UsageError(
            f"{root.resolve()} is no checkout of pairbench: it has no impls and suites; name one with --root"
        )
    others = taken_by(name, root)
    if others:
        where = " and ".join(str(path) for path in others)
        raise UsageError(f"a technique called {name!r} is in {where} already, and names are unique over all families")
    camel = "".join(word.capitalize() for word in name.split("_"))
    files = {
        root / "impls" / family / f"{name}.py": PAIR_TEMPLATE.replace("NAME", name),
        root / "suites" / family / f"{name}.py": SUITE_TEMPLATE.replace("NAME", name).replace("CLASS", camel),
    }
    taken = [str(p) for p in files if p.exists()]
    if taken:
        raise UsageError(f"{' and '.join(taken)} exist; nothing is overwritten: choose another name")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        package = path.parent / "__init__.py"
        if not package.exists():
            package.write_text(f'"""The {family} family."""\n')
        path.write_text(text)
    following = f"python3 -m harness run {name}"
    if json:
        options.print_json({"files": [str(path) for path in files], "next": following})
    else:
        print(*files, f"next: {following}", sep="\n")
