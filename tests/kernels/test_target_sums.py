"""Sums of scaled rows by index against float64, with repeated, absent and foreign targets."""

import pytest
import torch

from kernels.target_sums import add_at_rows_, add_by_target_

TARGETS = [3, 3, 0, -100, 7, 3, 8, 2, 0, 3, -1]  # of 8 rows: 8, -1 and -100 are none of them


@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 33, 1500])
def test_equals_float64(width, dtype, index, draw, assert_near):
    target = torch.tensor(TARGETS, dtype=index)
    tokens, own = draw(11, width, dtype=dtype), draw(11, seed=1)
    rows = draw(8, width, dtype=dtype, seed=2)
    inside = (target >= 0) & (target < 8)
    where, kept = target[inside].long(), inside.to(tokens.device)
    where = where.to(tokens.device)
    by_target = rows.double().index_add(0, where, own.double()[kept][:, None] * tokens.double()[kept])
    at_rows = tokens.double()
    at_rows[kept] += own.double()[kept][:, None] * rows.double()[where]
    target = target.to(tokens.device)
    got = rows.clone()
    add_by_target_(got, own, tokens, target)
    assert_near(got, by_target, units=2)
    add_at_rows_(tokens, own, rows, target)
    assert_near(tokens, at_rows, units=2)


def test_rows_that_are_nobodys_target_keep_their_bits(draw):
    out = draw(8, 40)
    got = out.clone()
    add_by_target_(got, draw(3, seed=1), draw(3, 40, seed=2), torch.tensor([5, 5, -100], device=out.device))
    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(got[others], out[others])
    assert not torch.equal(got[5], out[5])


def test_strided_rows_and_nothing_at_all(draw, assert_near):
    source, own = draw(24, 10).T[:, ::2], draw(10, seed=1)
    target = torch.arange(10, device=source.device) % 4
    out = torch.zeros(4, 12, device=source.device)
    add_by_target_(out, own, source, target)
    want = torch.zeros(4, 12, dtype=torch.float64, device=source.device)
    assert_near(out, want.index_add(0, target, own.double()[:, None] * source.double()), units=4)
    add_by_target_(out[:, :0], own, source[:, :0], target)
    add_at_rows_(out[:0], own[:0], source, target[:0])


def test_bad_input_is_named(draw):
    good = {"out": draw(8, 4), "own": draw(3), "source": draw(3, 4), "target": torch.tensor([0, 1, 2])}
    good["target"] = good["target"].to(good["out"].device)
    for change, message in [
        ({"out": draw(8, 4).double()}, "out: dtype"),
        ({"out": draw(4, 8).T}, "out: its last dimension"),
        ({"own": draw(2)}, "own: "),
        ({"own": draw(3).half()}, "own: "),
        ({"source": draw(3, 5)}, "source: shape"),
        ({"target": good["target"].float()}, "target: "),
    ]:
        with pytest.raises(ValueError, match=message):
            add_by_target_(**good | change)


@pytest.mark.slow
def test_compiled_for_hopper_with_16_byte_accesses(compile_for_hopper):
    common = {"out_ptr": "*bf16", "own_ptr": "*fp32", "source_ptr": "*bf16", "target_ptr": "*i64", "order_ptr": "*i64"}
    common |= dict.fromkeys(("rows", "out_stride", "source_stride", "limit"), "i32")
    common |= {"source_step": 1, "COLUMNS": 4096, "BLOCK": 1024}
    names = ("_at_rows_kernel", "_by_target_kernel")
    jobs = [{"kernel": f"kernels.target_sums:{name}", "arguments": common, "warps": 4} for name in names]
    for report in compile_for_hopper(jobs):
        assert report["stack"] == 0
        assert report["accesses"]["ld.v4.b32"] == 2
        assert report["accesses"]["st.v4.b32"] == 1
