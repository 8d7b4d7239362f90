"""The candidates of benchmarks/launch_shapes.py: each stands in for a kernel's own choice and changes no result."""

import pytest
import torch

from benchmarks import launch_shapes
from benchmarks.launch_shapes import FAMILIES, Place, run

HERE = Place("cuda" if torch.cuda.is_available() else "cpu", few=2)


def flat(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for t in result if isinstance(t, torch.Tensor)] if isinstance(result, (tuple, list)) else []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero):RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("family", ["add_rms_norm", "layer_norm_dropout_add", "softmax", "swiglu"])
def test_a_candidate_changes_no_result(family):
    torch.manual_seed(0)
    for case in FAMILIES[family](HERE):
        want = flat(run(case, {}))
        assert want
        name = sorted(case.candidates)[len(case.candidates) // 2]
        for got, wanted in zip(flat(run(case, case.candidates[name])), want, strict=True):
            torch.testing.assert_close(got.float(), wanted.float(), rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("family", ["paged_attention", "adamw", "bias_gelu", "rope"])
def test_every_candidate_names_attributes_that_the_module_has(family):
    for case in FAMILIES[family](HERE):
        assert case.nbytes > 0
        for attributes in case.candidates.values():
            assert all(hasattr(case.module, name) for name in attributes)


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launch_shapes.main(["swiglu"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_cases_are_chosen_by_a_part_of_their_name(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases = [launch_shapes.Case(name, 1, lambda: None, launch_shapes, {}) for name in ("4 bits, 1 tokens", "8 bits")]
    monkeypatch.setitem(launch_shapes.FAMILIES, "swiglu", lambda place: iter(cases))
    monkeypatch.setattr(launch_shapes, "timed", lambda case, rounds: {"as it is": 1.0})
    assert launch_shapes.main(["swiglu", "--case", "1 tokens"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["swiglu, 4 bits, 1 tokens"]
