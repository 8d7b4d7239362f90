"""The command itself checks every parallel pair on the ranks that its smoke workloads ask for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TECHNIQUES = (
    "collectives", "data_parallel", "tensor_parallel", "tp_decode", "context_parallel", "overlap", "zero",
    "expert_parallel",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TECHNIQUES)
def test_check_passes_on_two_ranks(name, tmp_path):
    environment = {**os.environ, "PAIRBENCH_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness", "check", name, "--tier", "smoke", "--device", "cpu", "--json"]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    records = [record for record in json.loads(found.stdout) if record["type"] == "measurement"]
    by_status = {record["status"] for record in records}
    assert by_status <= {"passed", "skipped"}
    passed = {record["variant"] for record in records if record["status"] == "passed"}
    assert "baseline" in passed
    assert len(passed) > 1
    assert all(record["reason"] for record in records if record["status"] == "skipped")
