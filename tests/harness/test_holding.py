"""What need not be held while a workload is measured, and when cases cannot stay side by side."""

import torch

from harness.holding import crowds, fit_together, form_of, own_copy, truth_of


def test_a_large_truth_is_no_longer_the_oracles_memory():
    small, large = torch.zeros(2), torch.zeros(100)
    assert truth_of({"x": small}, 64)["x"] is small
    kept = truth_of({"x": large, "tokens": [1]}, 64)
    assert kept["x"].device.type == "cpu"
    assert kept["tokens"] == [1]
    assert truth_of({"x": large}, None)["x"] is large


def test_a_copy_shares_nothing_with_the_case():
    x = torch.arange(4.0)
    found = {"x": x, "view": x[:2], "tokens": [3]}
    copy = own_copy(found)
    x.zero_()
    assert copy["x"].tolist() == [0, 1, 2, 3]
    assert copy["view"].tolist() == [0, 1]
    assert list(copy) == list(found) == ["x", "view", "tokens"]


def test_of_a_result_whose_values_are_not_asked_for_the_form_stays():
    x = torch.empty(3, 4, dtype=torch.bfloat16).T
    form = form_of({"x": x})["x"]
    assert (form.shape, form.stride(), form.dtype) == (x.shape, x.stride(), x.dtype)
    assert form.is_meta


def test_cases_crowd_by_what_all_of_them_would_hold():
    assert crowds(30, 4, 200)
    assert not crowds(20, 4, 200)
    assert not crowds(30, 4, None)


def test_cases_fit_together_when_each_can_run_beside_the_others():
    assert fit_together(10, [20, 20, 20], [30, 10, 10], 120)
    assert not fit_together(10, [20, 20, 20], [35, 10, 10], 120)
    assert fit_together(10, [200], [300], None)
