"""Where only what pairbench itself requires is installed, a command that needs more says what, and how to get it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.extras import EXTRAS, brings

ROOT = Path(__file__).resolve().parents[2]
#: Which torch itself requires.
KEPT = {"fsspec", "setuptools"}
RUN = """
import json, sys
from harness import cli
for args in json.loads(sys.argv[1]):
    sys.argv = ["pairbench", *args]
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    print(f"\\n## {code}", file=sys.stderr, flush=True)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to the packages of this environment, those of the extras left out."""
    gone = {module for extra in EXTRAS.values() for module in extra.modules} - KEPT
    folder = tmp_path_factory.mktemp("bare")
    import typer

    site = Path(typer.__file__).parents[1]
    for entry in site.iterdir():
        name = re.split(r"[-.]", entry.name)[0].lower()
        if name not in gone and entry.suffix != ".pth" and not entry.name.startswith("__editable__"):
            (folder / entry.name).symlink_to(entry)
    return folder


def test_every_command_that_needs_an_extra_names_it(bare: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    (store / "cpu").mkdir(parents=True)
    (store / "cpu" / "old.parquet").write_bytes(b"PAR1")
    table = tmp_path / "table.csv"
    table.write_text("x\n" + "1\n" * 20)
    at = ["--store", str(store)]
    asked = {
        "history": [
            ["regressions", *at], ["compare", "a", "b", *at], ["bisect", "x", *at],
            ["detect", str(table), "--value", "x"],
            ["history", "compact", *at], ["history", "generate", str(tmp_path / "made")],
        ],
        "dashboard": [["dashboard", *at], ["report", "--markdown", *at]],
        "s3": [["show", "--store", "s3://bucket/prefix"]],
    }  # fmt: skip
    expected = [(args, extra) for extra, commands in asked.items() for args in commands]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(bare)]), "PAIRBENCH_DATA": str(tmp_path / "data")}
    command = [sys.executable, "-S", "-c", RUN, json.dumps([args for args, _ in expected])]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    said = done.stderr.split("\n## ")
    codes = [part.partition("\n")[0] for part in said[1:]]
    words = [said[0], *(part.partition("\n")[2] for part in said[1:])]
    for (args, extra), code, text in zip(expected, codes, words, strict=False):
        assert code == "2", (args, code, text)
        assert "pairbench[" in text, (args, text)
        assert f"pairbench[{extra}]" in text or (extra == "dashboard" and "pairbench[history]" in text), (args, text)
        assert "Traceback" not in text
    assert len(codes) == len(expected)


def test_what_no_extra_brings_is_a_fault_of_ours() -> None:
    assert brings("no_such_module") is None
    assert "pairbench[history]" in str(brings("pyarrow.parquet"))
    assert "pip install pairbench" in str(brings("numpy.linalg"))
