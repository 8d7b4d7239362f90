"""asv plugin: environments that lend the packages of the Python running asv and hold this project's wheel alone.

``asv run`` goes across commits offline this way, with the torch that is there: one virtual environment, into which each
commit's wheel is installed in turn (the commands stand in asv.conf.json). Named in asv.conf.json as
``.harness.asv_environment``: the leading dot makes asv import it from the checkout.
"""

from __future__ import annotations

import fcntl
import os
import site
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from asv import util
from asv.environment import EnvironmentUnavailable
from asv.plugins.virtualenv import Virtualenv

from harness.commands.options import device

LENT = "pairbench-lent-packages.pth"


class LendingVirtualenv(Virtualenv):  # type: ignore[misc]
    """``environment_type`` ``pairbench``. Its name ends on the tier, since a result file of asv is named after it."""

    tool_name = "pairbench"
    _held: ClassVar[dict[str, int]] = {}

    def __init__(
        self, conf: Any, python: str, requirements: Mapping[str, str], tagged_env_vars: Mapping[tuple[str, str], str]
    ) -> None:
        """Raises EnvironmentUnavailable: another Python than the one that lends its packages."""
        here = f"{sys.version_info[0]}.{sys.version_info[1]}"
        if python != here:
            raise EnvironmentUnavailable(f"Python {python}: asv runs on {here}, whose packages are lent; run asv there")
        super().__init__(conf, python, requirements, tagged_env_vars)
        self._executable = sys.executable

    @property
    def name(self) -> str:
        """Environment, Python and tier."""
        return f"{super().name}-{tier()}"

    def create(self) -> None:
        """Makes it where it is not, and keeps it for this command alone.

        Raises:
            UserError: another command has it, and would measure the commits that this one installs under its own.
        """
        if self._path not in self._held:
            Path(self._env_dir).mkdir(parents=True, exist_ok=True)
            lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o644)  # closed with the process
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as err:
                os.close(lock)
                raise util.UserError(
                    f"another asv command measures in {self._path}: let it end, or use another clone"
                ) from err
            self._held[self._path] = lock
        super().create()

    def _setup(self) -> None:
        seed = ["--no-download", "--no-periodic-update", "--no-setuptools"]
        env = {**os.environ, **self.build_env_vars}
        util.check_call([sys.executable, "-m", "virtualenv", *seed, "-p", self._executable, self._path], env=env)
        packages = self.run_executable("python", ["-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"])
        Path(packages.strip(), LENT).write_text(self._lends(), encoding="utf-8")

    def check_presence(self) -> bool:
        """Whether it is there and lends what this Python has now; asv makes it anew when not."""
        return bool(super().check_presence()) and any(
            lent.read_text(encoding="utf-8") == self._lends()
            for lent in Path(self._path).glob(f"lib*/python*/site-packages/{LENT}")
        )

    def _lends(self) -> str:
        lines = [f"# for {Path(self._executable).resolve()}", *lent_folders()]
        return "".join(f"{line}\n" for line in lines)


def tier() -> str:
    """The tier that asv's processes measure: ``PAIRBENCH_TIER``, set here for all of them when it is not."""
    return os.environ.setdefault("PAIRBENCH_TIER", "quick" if device("auto") == "cuda" else "smoke")


def lent_folders() -> list[str]:
    """The package folders of this Python, those on PYTHONPATH included; none that is a checkout of this project.

    Where this project is installed among the packages, those of a commit's own wheel come first.
    """
    named = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    own = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    folders = [str(Path(p).resolve()) for p in [*named, *own] if Path(p).is_dir()]
    return list(dict.fromkeys(folder for folder in folders if not _is_checkout(Path(folder))))


def _is_checkout(folder: Path) -> bool:
    return Path(folder, "harness", "record.py").exists() and not any(folder.glob("pairbench-*.dist-info"))
