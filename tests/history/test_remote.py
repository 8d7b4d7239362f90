"""The store in an object store: the same records, one object a run, nothing lost when the network goes."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.errors import StoreError
from harness.history import query, writer
from harness.history.compact import compact, restore
from harness.history.engine import History
from harness.history.index import store_state
from harness.history.store import Store

pytest.importorskip("s3fs")
pytest.importorskip("moto.server")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:moto.*"),
]
Make = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """moto's server in this process, on a free port of the loopback."""
    from moto.server import ThreadedMotoServer

    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture
def url(server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix in an empty bucket, reached as a user would: by the environment."""
    import fsspec

    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3").clear_instance_cache()
    bucket = f"b{uuid.uuid4().hex[:12]}"
    fsspec.filesystem("s3").mkdir(bucket)
    return f"s3://{bucket}/history"


def test_what_is_appended_is_read_back(url: str, make_record: Make) -> None:
    store = Store(url)
    assert list(store.read()) == []
    with store.open_run("NVIDIA H200", "r1") as run:
        for number in range(3):
            run.append(make_record(number))
            assert len(list(Store(url).read())) == number + 1  # there before the run is closed
    assert [entry.name for entry in store.entries()] == ["NVIDIA-H200/r1.jsonl"]
    assert list(Store(url).read()) == [make_record(n) for n in range(3)]
    with pytest.raises(StoreError, match="exists already"):
        store.open_run("NVIDIA H200", "r1")


def test_two_runs_never_touch_each_other(url: str, make_record: Make) -> None:
    a, b = Store(url).open_run("h200", "a"), Store(url).open_run("h200", "b")
    for number in range(3):
        a.append(make_record(number, run="a"))
        b.append(make_record(number, run="b"))
    a.close()
    b.close()
    assert sorted(r["id"] for r in Store(url).read()) == [f"{run}-{n}" for run in "ab" for n in range(3)]


def test_a_long_run_goes_on_in_another_object(url: str, make_record: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_BYTES", 1500)
    with Store(url).open_run("h200", "r1") as run:
        for number in range(7):
            run.append(make_record(number))
    names = [entry.name for entry in Store(url).entries()]
    assert len(names) > 1
    assert all(name.startswith("h200/r1") for name in names)
    assert sorted(r["id"] for r in Store(url).read()) == [f"r1-{n}" for n in range(7)]


def test_a_bucket_that_is_not_there_is_said_before_anything_is_measured(url: str) -> None:
    missing = "s3://no-such-bucket-anywhere/x"
    with pytest.raises(StoreError, match="no-such-bucket-anywhere"):
        Store(missing).open_run("h200", "r1")
    with pytest.raises(StoreError, match="no such bucket"):
        Store(missing).entries()


def test_records_survive_a_network_that_goes_and_comes(
    url: str, make_record: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(writer.tempfile, "gettempdir", lambda: str(tmp_path))
    run = Store(url).open_run("h200", "r1")
    run.append(make_record(0))
    honest = run._folder.replace  # type: ignore[attr-defined]

    def gone(name: str, content: bytes) -> None:
        raise StoreError("store: the network is gone")

    monkeypatch.setattr(run._folder, "replace", gone)  # type: ignore[attr-defined]
    run.append(make_record(1))
    run.append(make_record(2))
    assert run.spilled is not None
    assert [r["id"] for r in Store(run.spilled).read()] == ["r1-1", "r1-2"]
    monkeypatch.setattr(run._folder, "replace", honest)  # type: ignore[attr-defined]
    run.append(make_record(3))
    assert run.spilled is None
    monkeypatch.setattr(run._folder, "replace", gone)  # type: ignore[attr-defined]
    run.append(make_record(4))
    with pytest.raises(StoreError, match="1 record") as found:
        run.close()
    assert str(tmp_path) in str(found.value)
    assert [r["id"] for r in Store(url).read()] == [f"r1-{n}" for n in range(4)]


def test_compaction_queries_and_damage(url: str, make_record: Make, tmp_path: Path) -> None:
    store = Store(url)
    for name in ("r1", "r2"):
        with store.open_run("h200", name) as run:
            for number in range(3):
                run.append(make_record(number, run=name, latency=1e-3 * (number + 1)))
    store.folder.replace("h200/torn.jsonl", b'{"schema": 1,')
    state = store_state(url)
    with History([store], threads=1) as history:
        history.refresh()
        assert len(query.runs(history)) == 2
        assert [d.line for d in history.damage] == [1]
        before = query.run_records(history, "r1")
        assert compact(store).files == []  # written a moment ago: the writer may still be at it
        done = compact(store, min_age_s=0)
        assert done.records == 6
        assert [entry.name.rsplit(".")[-1] for entry in store.entries()] == ["parquet", "jsonl"]
        assert store_state(url) != state
        assert history.refresh()
        assert query.run_records(history, "r1") == before
        assert len(query.runs(history)) == 2
        assert not history.refresh()
    assert sorted(restore(store, tmp_path)) == ["h200/r1.jsonl", "h200/r2.jsonl"]
    lines = (tmp_path / "h200" / "r1.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["r1-0", "r1-1", "r1-2"]
