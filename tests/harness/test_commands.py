"""What single commands say and exit with, in this process: bad use, damage, and what is not here."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from harness import cli, discover
from harness.errors import MachineUnfit

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pairbench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Main]:
    """Runs the command line; gives its exit code and what it wrote to both outputs."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pairbench", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The rooms that ``new`` writes to, with a technique in one family."""
    for room in ("impls", "suites"):
        (tmp_path / room / "fusion").mkdir(parents=True)
    source = Path(discover.find("add_rms_norm").path)
    (tmp_path / "impls" / "fusion" / "add_rms_norm.py").write_text(source.read_text())
    return tmp_path


def _files(folder: Path) -> set[Path]:
    return {p for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(params=["newer", "garbage", "torn"])
def unreadable(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, str]:
    """A store without one sound record: its folder, where the damage is, and a word that says what it is."""
    store = tmp_path / "store"
    (store / "H200").mkdir(parents=True)
    file = store / "H200" / "20260101T000000Z-aaaaaaaa.jsonl"
    if request.param == "newer":
        file.write_text('{"schema": 99, "type": "measurement"}\n' * 2)
        return str(store), f"{file.name}:2", "upgrade pairbench"
    if request.param == "torn":
        file.write_text('{"schema": 1, "type"')
        return str(store), f"{file.name}:1", "breaks off"
    (store / "H200" / "garbage.bin").write_bytes(bytes(range(256)))
    return str(store), "garbage.bin", "not a file of the history"


@pytest.mark.parametrize(
    "command",
    [("show",), ("show", "2026"), ("show", "--json"), ("regressions",), ("regressions", "--technique", "kv_cache"),
     ("compare", "a1", "b1"), ("bisect", "kv_cache"), ("export", "csv")],
)  # fmt: skip
def test_a_store_with_nothing_but_damage_is_not_called_empty(
    pairbench: Main, unreadable: tuple[str, str, str], command: tuple[str, ...]
) -> None:
    store, where, word = unreadable
    code, out, err = pairbench(*command, "--store", store)
    assert code in (1, 2)
    assert where in err
    assert word in err
    assert "'pairbench run' makes a first record" not in err
    assert out == ""


def test_an_empty_store_is_called_empty(pairbench: Main, tmp_path: Path) -> None:
    code, _, err = pairbench("show", "--store", str(tmp_path))
    assert code == 2
    assert "the history is empty" in err


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the commands would have measured, by name; nothing is."""
    done: list[str] = []

    def measures(name: str) -> Callable[..., object]:
        def stand_in(*_: object, **__: object) -> object:
            done.append(name)
            raise MachineUnfit(f"{name} was reached")

        return stand_in

    monkeypatch.setattr("harness.machine.probe", measures("machine"))
    monkeypatch.setattr("harness.runner.launch", measures("technique"))
    return done


@pytest.mark.parametrize("place", ["/proc/pairbench", "file/below"])
@pytest.mark.parametrize(
    "command",
    [
        ("machine",),
        ("machine", "--recalibrate"),
        ("run", "add_rms_norm"),
        ("run", "add_rms_norm", "--no-store"),
        ("run", "add_rms_norm", "--store", "STORE"),
    ],
)
def test_a_data_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    pairbench: Main,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    place: str,
    command: tuple[str, ...],
) -> None:
    (tmp_path / "file").write_text("a file is no folder")
    folder = str(tmp_path / place)  # an absolute place stays as it is
    monkeypatch.setenv("PAIRBENCH_DATA", folder)
    args = [a.replace("STORE", str(tmp_path / "store")) for a in command]
    code, _, err = pairbench(*args, "--device", "cpu")
    assert code == 2
    assert folder in err
    assert "set PAIRBENCH_DATA" in err
    assert measured == []
    assert not (tmp_path / "store").exists()


def test_a_data_folder_that_can_be_written_is_made(
    pairbench: Main, measured: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path / "new" / "data"))
    code, _, _ = pairbench("run", "add_rms_norm", "--device", "cpu")
    assert code == 3  # the stand-in was reached
    assert measured == ["machine"]


@pytest.mark.parametrize(
    ("command", "word"),
    [
        (("run", "add_rms_norm"), "the beginning of the run is kept in STORE"),
        (("run", "add_rms_norm", "--no-store"), "nothing is kept"),
        (("check", "add_rms_norm"), "nothing is kept"),
        (("nightly", "add_rms_norm"), "is kept in STORE"),
        (("list",), "interrupted"),
    ],
)
def test_an_interrupt_says_in_one_line_what_is_kept(
    pairbench: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...], word: str
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    for place in ("harness.machine.probe", "harness.runner.launch", "harness.nightly.run_step"):
        monkeypatch.setattr(place, interrupt)
    monkeypatch.setattr("harness.discover.techniques", interrupt if command == ("list",) else discover.techniques)
    store = tmp_path / "store"
    where = ("--store", str(store)) if "STORE" in word else ()
    out = ("--out", str(tmp_path / "out")) if command[0] == "nightly" else ()
    code, _, err = pairbench(*command, *where, *out)
    assert code == 130
    last = err.splitlines()[-1]
    assert last.startswith("pairbench: interrupted")
    assert word.replace("STORE", str(store)) in last
    assert "Traceback" not in err


#: What prints no data (it serves pages), or prints it in a format that it is asked for.
NO_JSON = {"dashboard", "report", "export", "figures"}


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield from _commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


def test_every_command_that_prints_data_prints_it_as_json_too() -> None:
    found = dict(_commands(typer.main.get_command(cli.make_app())))
    assert {("models", "fetch"), ("new",), ("nightly",), ("history", "verify")} <= set(found)
    without = {path for path, command in found.items() if not any("--json" in p.opts for p in command.params)}
    assert without == {(name,) for name in NO_JSON}


def test_models_fetch_gives_the_path_as_json_and_the_rest_apart(
    pairbench: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import impls.model.fetch as fetching

    carried = tmp_path / "carried.gguf"
    carried.write_bytes(b"weights")
    monkeypatch.setattr(fetching, "_in_package", lambda: carried)
    monkeypatch.setattr(fetching, "SHA256", hashlib.sha256(b"weights").hexdigest())
    for dest in ((), ("--dest", str(tmp_path / "to"))):
        code, out, err = pairbench("models", "fetch", "--json", *dest)
        assert code == 0
        path = Path(json.loads(out)["path"])
        assert path == (tmp_path / "to" / fetching.FILE if dest else carried)
        assert path.read_bytes() == b"weights"
        assert "verified" in err


def test_new_and_nightly_give_json(
    pairbench: Main, checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    code, out, _ = pairbench("new", "my_idea", "--root", str(checkout), "--json")
    assert code == 0
    assert all(Path(file).is_file() for file in json.loads(out)["files"])
    monkeypatch.setattr("harness.nightly.run_step", lambda *_: 1)
    code, out, err = pairbench("nightly", "--out", str(tmp_path / "out"), "--json")
    said = json.loads(out)
    assert code == said["exit_code"] == 3
    assert [step["name"] for step in said["steps"]] == ["doctor"]
    assert "doctor" in err


@pytest.mark.parametrize("family", ["other", "fusion"])
def test_new_refuses_the_name_of_a_technique_of_any_family(pairbench: Main, checkout: Path, family: str) -> None:
    before = _files(checkout)
    code, _, err = pairbench("new", "add_rms_norm", "--family", family, "--root", str(checkout))
    assert code == 2
    assert str(checkout / "impls" / "fusion" / "add_rms_norm.py") in err
    assert _files(checkout) == before


def test_new_refuses_the_name_of_another_packages_technique(
    pairbench: Main, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "toys"))
    before = _files(checkout)
    code, _, err = pairbench("new", "toy_serve", "--root", str(checkout))
    assert code == 2
    assert "toy_serve.py" in err
    assert _files(checkout) == before


def test_new_writes_a_name_that_is_free(pairbench: Main, checkout: Path) -> None:
    code, out, _ = pairbench("new", "my_idea", "--family", "other", "--root", str(checkout))
    assert code == 0
    assert str(checkout / "impls" / "other" / "my_idea.py") in out
