"""Finds the techniques: one file in impls each, read from its source without importing it (so without torch).

A technique is a module ``impls/<family>/<name>.py`` that assigns ``PAIR = Pair(...)``; its workloads are ``WORKLOADS``
in ``suites/<family>/<name>.py``. A package of somebody else adds techniques through the entry-point group
``pairbench.techniques``: each entry names a module with ``PAIR`` and ``WORKLOADS`` in it.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import UsageError, unknown
from harness.workload import Workload, parse_workloads

if TYPE_CHECKING:
    from harness.pair import Pair

ENTRY_POINTS = "pairbench.techniques"


@dataclass(frozen=True)
class VariantInfo:
    """What the source says of a variant."""

    name: str
    peer: str = ""
    requires: tuple[str, ...] = ()
    compiled: bool = False


@dataclass(frozen=True)
class Technique:
    """A technique as its source declares it; ``problem`` says why it cannot be used, or is None."""

    name: str
    family: str
    module: str
    path: Path
    summary: str = ""
    kind: str = "op"
    layer: str = ""
    relieves: str = ""
    claim: Mapping[str, str] = field(default_factory=dict)
    variants: tuple[VariantInfo, ...] = ()
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The technique for ``pairbench list --json``."""
        workloads: list[dict[str, Any]] = []
        problem = self.problem
        if problem is None:
            try:
                workloads = [
                    {"name": w.name, "tier": w.tier, "dtype": w.dtype, "workload_id": w.workload_id, **dict(w.dims)}
                    for w in workloads_of(self)
                ]
            except UsageError as err:
                problem = str(err)
        return {
            "name": self.name,
            "family": self.family,
            "kind": self.kind,
            "layer": self.layer,
            "relieves": self.relieves,
            "claim": dict(self.claim),
            "summary": self.summary,
            "variants": [
                {"name": v.name, "peer": v.peer, "requires": list(v.requires), "compiled": v.compiled}
                for v in self.variants
            ],
            "workloads": workloads,
            "module": self.module,
            "problem": problem,
        }


def techniques() -> dict[str, Technique]:
    """Every technique by name, in the order of family and file.

    Raises:
        UsageError: two techniques of one name; both files are named.
    """
    found: dict[str, Technique] = {}
    for technique in [*_own(), *_foreign()]:
        other = found.get(technique.name)
        if other is not None:
            raise UsageError(f"two techniques are called {technique.name!r}: {other.path} and {technique.path}")
        found[technique.name] = technique
    return found


def taken_by(name: str, root: Path) -> list[Path]:
    """The files that give a technique this name where ``root`` is the checkout: its own, and other packages'."""
    own = _in_folder(root / "impls")
    return [technique.path for technique in (*own, *_foreign()) if technique.name == name]


def find(name: str) -> Technique:
    """The technique of that name.

    Raises:
        UsageError: there is none (the nearest are named), or its file cannot be read.
    """
    known = techniques()
    if name not in known:
        raise unknown("technique", name, known)
    technique = known[name]
    if technique.problem is not None:
        raise UsageError(f"technique {name!r} cannot be used: {technique.problem}")
    return technique


def load_pair(technique: Technique) -> Pair:
    """Imports the technique's module (and so torch) and returns its pair."""
    pair: Pair = importlib.import_module(technique.module).PAIR
    return pair


def workloads_of(technique: Technique) -> list[Workload]:
    """The workloads in suites/<family>/<name>.py, or in the module of an entry point. Imports no torch of its own.

    Raises:
        UsageError: there are none, or one is malformed.
    """
    module = (
        f"suites.{technique.family}.{technique.name}" if technique.module.startswith("impls.") else technique.module
    )
    try:
        raws = importlib.import_module(module).WORKLOADS
    except ModuleNotFoundError as err:
        if err.name is not None and module.startswith(err.name):
            raise UsageError(f"technique {technique.name!r} has no workloads: {module} does not exist") from err
        raise
    except AttributeError as err:
        raise UsageError(f"technique {technique.name!r} has no workloads: {module} has no WORKLOADS") from err
    return parse_workloads(technique.name, raws, module)


def _own() -> Iterator[Technique]:
    spec = importlib.util.find_spec("impls")
    for root in (spec.submodule_search_locations or []) if spec else []:
        yield from _in_folder(Path(root))


def _in_folder(impls: Path) -> Iterator[Technique]:
    for path in sorted(impls.glob("*/*.py")):
        family, name = path.parent.name, path.stem
        if name.startswith("_"):
            continue
        technique = read_source(path, family, f"impls.{family}.{name}")
        if technique is not None:
            yield technique


def _foreign() -> Iterator[Technique]:
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        module = entry.value.partition(":")[0]
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        if spec is None or spec.origin is None:
            yield Technique(
                entry.name, "external", module, Path(module), problem=f"entry point {entry.value!r} cannot be found"
            )
            continue
        technique = read_source(Path(spec.origin), "external", module)
        yield technique or Technique(
            entry.name, "external", module, Path(spec.origin), problem=f"{spec.origin} assigns no PAIR = Pair(...)"
        )


def read_source(path: Path, family: str, module: str) -> Technique | None:
    """The technique that a file declares, or None when it declares none.

    A file that does not parse, or whose listed fields are not literals, gives a technique with a ``problem``.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError) as err:
        return Technique(path.stem, family, module, path, problem=f"{path.name} does not parse: {err}")
    call = _pair_call(tree)
    if call is None:
        return None
    summary = (ast.get_docstring(tree) or "").strip().partition("\n")[0]
    fields = {k.arg: k.value for k in call.keywords if k.arg}
    try:
        name = _literal(fields, "name")
        if name != path.stem and module.startswith("impls."):
            raise UsageError(f"its name is {name!r} but its file is {path.name}")
        return Technique(
            name=name,
            family=family,
            module=module,
            path=path,
            summary=summary,
            kind=_literal(fields, "kind", "op"),
            layer=_literal(fields, "layer"),
            relieves=_literal(fields, "relieves"),
            claim=_claim(fields.get("claim")),
            variants=_variants(fields.get("variants")),
        )
    except UsageError as err:
        return Technique(path.stem, family, module, path, summary=summary, problem=str(err))


def _pair_call(tree: ast.Module) -> ast.Call | None:
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            continue
        if "PAIR" in names and isinstance(node.value, ast.Call):
            return node.value
    return None


def _literal(fields: Mapping[str, ast.expr], key: str, default: str | None = None) -> str:
    node = fields.get(key)
    if node is None:
        if default is None:
            raise UsageError(f"Pair(...) lacks {key}=")
        return default
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise UsageError(f"Pair({key}=...) must be a literal string, so that it can be listed without an import")


def _claim(node: ast.expr | None) -> dict[str, str]:
    if not isinstance(node, ast.Call):
        raise UsageError("Pair(claim=...) must be written as Claim(...)")
    out = {}
    for keyword in node.keywords:
        if keyword.arg is None or not isinstance(keyword.value, ast.Constant):
            raise UsageError("Claim(...) takes literal strings")
        out[keyword.arg] = str(keyword.value.value)
    return out


def _variants(node: ast.expr | None) -> tuple[VariantInfo, ...]:
    if not isinstance(node, ast.Dict):
        raise UsageError("Pair(variants=...) must be a dict display")
    out = []
    for key, value in zip(node.keys, node.values, strict=True):
        if not (isinstance(key, ast.Constant) and isinstance(key.value, str)):
            raise UsageError("the names of variants must be literal strings")
        out.append(_variant(key.value, value))
    return tuple(out)


def _variant(name: str, value: ast.expr) -> VariantInfo:
    called = value.func if isinstance(value, ast.Call) else None
    if not (isinstance(value, ast.Call) and isinstance(called, ast.Name) and called.id == "Variant"):
        return VariantInfo(name)
    keywords = {k.arg: k.value for k in value.keywords if k.arg}
    try:
        peer = ast.literal_eval(keywords["peer"]) if "peer" in keywords else ""
        requires = tuple(ast.literal_eval(keywords["requires"])) if "requires" in keywords else ()
        compiled = bool(ast.literal_eval(keywords["compiled"])) if "compiled" in keywords else False
    except ValueError as err:
        raise UsageError(f"variant {name!r}: peer, requires and compiled must be literals") from err
    return VariantInfo(name, str(peer), tuple(str(r) for r in requires), compiled)
