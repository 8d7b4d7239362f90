"""What the routed experts launch on a GPU: as few kernels as said, and none compiled anew by a number of pairs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Rows, choices, experts, and pairs at most: as a rank of several has them from step to step.
STEPS = [[64, 2, 4, 100], [64, 2, 4, 96], [63, 2, 4, 99], [61, 2, 4, 110], [64, 2, 4, 101]]


def launched(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, str(Path(__file__).with_name("launch_keys.py")), *arguments]
    process = subprocess.run(command, input=json.dumps(STEPS), env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.fixture(scope="module")
def launches():
    return launched()


@pytest.fixture(scope="module")
def launches_of_many_rows():
    return launched("many")


def test_eleven_forward_and_backward_none_of_them_torch_s_own(launches):
    assert sum(count for count, _ in launches.values()) == 11 * len(STEPS)
    assert "torch" not in launches


def test_another_number_of_pairs_compiles_nothing_anew(launches):
    twice = {"rows_kernel", "combine_kernel", "weights_kernel"}  # forward and backward, or two gradients
    assert {name: kinds for name, (_, kinds) in launches.items()} == {name: 1 + (name in twice) for name in launches}


def test_nine_and_thirteen_where_rows_are_laid_out_of_which_six_clear_a_counter(launches_of_many_rows):
    assert sum(count for count, _ in launches_of_many_rows.values()) == (9 + 13) * len(STEPS)
    assert launches_of_many_rows["torch"] == [6 * len(STEPS), 1]


def test_nor_does_it_where_rows_are_laid_out(launches_of_many_rows):
    more = {"hopper_product_kernel": 3, "combine_kernel": 2}  # over rows, across, and of weights
    kinds = {name: kinds for name, (_, kinds) in launches_of_many_rows.items()}
    assert kinds == {name: more.get(name, 1) for name in launches_of_many_rows}
