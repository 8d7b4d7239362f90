"""The attention page's tables: made from kept surveys, each figure with its peers', its prediction and its source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from impls.attention import outcomes
from impls.attention.candidates import candidates, is_picked

PAGE = "before\n<!-- surveys: forward -->\nold\n<!-- end -->\nmid\n<!-- surveys: sources -->\n<!-- end -->\nafter\n"
NAME = candidates(128, True, "forward", (9, 0))[0].name


def row(name: str, tflops: float | None, **fields: Any) -> dict[str, Any]:
    return {
        "group": "triton", "name": name, "direction": "forward", "head_dim": 128, "causal": True, "seq": 4096,
        "registers": None, "spills": None, "shared": None, "products": None, "check": "right", "tflops": tflops,
        "predicted": 0.77, "why": "because", "samples_ms": [1.0, 1.1, 1.2] if tflops else [],
    } | fields  # fmt: skip


def peer(name: str, tflops: float, **fields: Any) -> dict[str, Any]:
    return row(name, tflops, group="torch", check="peer", **fields)


def write(path: Path, time: str, rows: list[dict[str, Any]], gpu: str = "some-gpu") -> Path:
    path.write_text(
        json.dumps({"time": time, "gpu": gpu, "stack": {"torch": "9.9"}, "timing": "by hand", "rows": rows})
    )
    return path


def line_of(text: str, name: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith((f"| D=128 {name} |", f"| D=128 {name} *"))]
    return found


def test_a_figure_stands_beside_its_prediction_and_the_peers_of_its_own_run(tmp_path: Path) -> None:
    early = [row(NAME, 100.0), peer("sdpa_cudnn", 200.0), peer("sdpa_flash", 80.0), peer("sdpa_cudnn", 1.0, seq=2048)]
    outcomes.keep(write(tmp_path / "a", "2026-01-02T03:04:05Z", early), tmp_path)
    text = outcomes.fill(PAGE, outcomes.kept(tmp_path))
    line = line_of(text, NAME)
    assert line.endswith("| not yet measured | 100, 0.50 of cuDNN, 1.25 of FA2 [a] |")
    assert "/ 0.77: " in line, "the prediction is the one that the survey carried"
    assert "- [a] 2026-01-02T03:04:05Z, some-gpu, torch 9.9; medians of 3 rounds, 18% from the fastest" in text
    assert "slowest; by hand (`results/surveys/some-gpu/20260102T030405Z.json`)" in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    later = [row(NAME, 150.0), peer("sdpa_cudnn", 600.0)]
    outcomes.keep(write(tmp_path / "b", "2026-02-02T03:04:05Z", later), tmp_path)
    line = line_of(outcomes.fill(text, outcomes.kept(tmp_path)), NAME)
    assert line.endswith("| 150, 0.25 of cuDNN [b] |"), "the newest counts, with the peers of its own run only"


def test_what_was_not_timed_or_wrong_or_not_reached_is_told_apart(tmp_path: Path) -> None:
    names = [c.name for c in candidates(128, True, "forward", (9, 0))]
    rows = [
        row(names[0], None), row(names[1], None, seq=0, check="wrong: out off by 3"),
        row(names[2], None, seq=0, check="not reached in time"), row("one that is gone", 7.0),
    ]  # fmt: skip
    outcomes.keep(write(tmp_path / "a", "2026-01-02T03:04:05Z", rows), tmp_path)
    text = outcomes.fill(PAGE, outcomes.kept(tmp_path))
    assert line_of(text, names[0]).endswith("| right, not timed [a] |")
    assert line_of(text, names[1]).endswith("| wrong: out off by 3 [a] |")
    assert line_of(text, names[2]).endswith("| not yet measured |")
    assert line_of(text, "one that is gone").endswith("| – | 7 [a] |")
    removed = [line.split(" *tried, removed* |")[0] for line in text.splitlines() if "*tried, removed*" in line]
    assert removed == ["| D=128 one that is gone"], "a candidate is never marked as removed, measured or not"


def test_a_removed_candidate_keeps_its_prediction_and_what_the_compiler_made_of_it(tmp_path: Path) -> None:
    made = row("gone", None, registers=122, spills=0, shared=114720, products=16, seq=0, check="compiled")
    outcomes.keep(write(tmp_path / "a", "2026-01-02T03:04:05Z", [made], gpu="sm_90"), tmp_path)
    measured = [row("gone", 50.0), peer("sdpa_cudnn", 100.0)]
    outcomes.keep(write(tmp_path / "b", "2026-01-03T03:04:05Z", measured), tmp_path)
    line = line_of(outcomes.fill(PAGE, outcomes.kept(tmp_path)), "gone")
    assert line.endswith(
        "*tried, removed* | – / 122 | – / 0 | – / 114,720 | – / 16 | – / 0.77: because | – | 50, 0.50 of cuDNN [b] |"
    )


def test_the_compilers_figures_come_from_a_survey_that_compiled(tmp_path: Path) -> None:
    figures = {"registers": 255, "spills": 3, "shared": 98336, "products": 24, "seq": 0, "check": "compiled"}
    built = [row(NAME, None, **figures), row(NAME, None, **{**figures, "causal": False, "spills": 0})]
    outcomes.keep(write(tmp_path / "a", "2026-01-02T03:04:05Z", built, gpu="sm_90"), tmp_path)
    line = line_of(outcomes.fill(PAGE, outcomes.kept(tmp_path)), NAME)
    assert "| 255 | 0 / 3 | 98,336 | 24 |" in line
    assert line.endswith("| not yet measured | not yet measured |"), "compiling is no measurement"


def test_the_peers_rates_are_the_newest_of_the_tables_length(tmp_path: Path) -> None:
    early = [peer("sdpa_cudnn", 200.0), peer("sdpa_flash", 80.0), peer("sdpa_cudnn", 999.0, seq=2048)]
    outcomes.keep(write(tmp_path / "a", "2026-01-02T03:04:05Z", early), tmp_path)
    outcomes.keep(write(tmp_path / "b", "2026-02-02T03:04:05Z", [peer("sdpa_cudnn", 300.0)]), tmp_path)
    text = outcomes.fill("<!-- surveys: peers -->\n<!-- end -->\n" + PAGE, outcomes.kept(tmp_path))
    assert "| forward, D=128 | not yet measured | 80 [a] | not yet measured | 300 [b] |" in text
    assert "| backward, D=64 | not yet measured | not yet measured | not yet measured | not yet measured |" in text
    assert "- [b] 2026-02-02T03:04:05Z" in text


def test_nothing_is_overwritten_and_a_survey_without_its_origin_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "2026-01-02T03:04:05Z", [row(NAME, 1.0)])
    assert outcomes.keep(path, tmp_path) == tmp_path / "some-gpu" / "20260102T030405Z.json"
    with pytest.raises(FileExistsError):
        outcomes.keep(path, tmp_path)
    path.write_text(json.dumps([row(NAME, 1.0)]))
    with pytest.raises(ValueError, match="when and on what"):
        outcomes.keep(path, tmp_path)
    with pytest.raises(ValueError, match="nonsense is no part"):
        outcomes.fill("<!-- surveys: nonsense -->\n<!-- end -->", [])


def test_the_page_is_what_the_kept_surveys_make_of_it() -> None:
    page = Path(__file__).parents[2] / "docs" / "attention.md"
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- surveys: ") == 6
    assert outcomes.fill(text, outcomes.kept()) == text, "run python3 -m impls.attention.outcomes --write"


def test_each_length_has_its_newest_figure_over_the_peers_of_the_same_length(tmp_path: Path) -> None:
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    write(folder / "a.json", "2026-01-01T00:00:00Z", [row(NAME, 100.0, seq=2048), peer("sdpa_cudnn", 400.0, seq=2048)])
    newer = [row(NAME, 300.0, seq=2048), peer("sdpa_cudnn", 400.0, seq=2048), row(NAME, 500.0, seq=8192)]
    write(folder / "b.json", "2026-01-02T00:00:00Z", newer)
    page = outcomes.fill("<!-- surveys: lengths -->\n<!-- end -->", outcomes.kept(tmp_path))
    assert "| kernel | S=2048 | S=8192 |" in page
    (line,) = [line for line in page.splitlines() if f"forward, D=128, causal: {NAME}" in line]
    assert line.endswith("| 300, 0.75 of cuDNN [a] | 500 [a] |")


def test_each_length_says_what_is_picked_there_measured_or_not(tmp_path: Path) -> None:
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    write(folder / "a.json", "2026-01-01T00:00:00Z", [row(NAME, 100.0, seq=seq) for seq in (4096, 16384)])
    page = outcomes.fill("<!-- surveys: lengths -->\n<!-- end -->", outcomes.kept(tmp_path))
    for dim, causal in ((64, False), (64, True), (128, True), (256, False)):
        what = f"| forward, D={dim}, {'causal' if causal else 'full'}: "
        said = [line.split(" |")[0].removeprefix(what) for line in page.splitlines() if line.startswith(what)]
        for seq in (4096, 16384):
            (chosen,) = [c for c in candidates(dim, causal, "forward", (9, 0)) if is_picked(c, causal, seq)]
            marked = [name for name in said if name.endswith("**picked**") or f"S={seq}**" in name]
            assert [name.split(" **")[0] for name in marked] == [chosen.name], f"{dim} {causal} {seq}: {said}"


def test_a_kernel_found_wrong_has_no_older_figure_at_any_length_until_it_is_timed_again(tmp_path: Path) -> None:
    folder = tmp_path / "some-gpu"
    folder.mkdir()
    page = "<!-- surveys: lengths -->\n<!-- end -->"
    others = [row("another", 1.0, seq=2048), row("another", 1.0, seq=8192)]
    write(folder / "a.json", "2026-01-01T00:00:00Z", [row(NAME, 300.0, seq=2048), row(NAME, 500.0, seq=8192), *others])
    write(folder / "b.json", "2026-01-02T00:00:00Z", [row(NAME, None, seq=0, check="wrong: off by 3")])

    def line() -> str:
        (found,) = [line for line in outcomes.fill(page, outcomes.kept(tmp_path)).splitlines() if NAME in line]
        return found

    assert line().endswith("| wrong: off by 3 [b] | wrong: off by 3 [b] |")
    write(folder / "c.json", "2026-01-03T00:00:00Z", [row(NAME, 400.0, seq=2048)])
    assert line().endswith("| 400 [c] | wrong: off by 3 [b] |")


def test_a_failure_at_another_length_leaves_the_tables_figure(tmp_path: Path) -> None:
    rows = [row(NAME, 100.0), row(NAME, None, seq=16384, check="error: OutOfMemoryError: no room")]
    outcomes.keep(write(tmp_path / "a", "2026-01-02T03:04:05Z", rows), tmp_path)
    page = PAGE + "<!-- surveys: lengths -->\n<!-- end -->"
    text = outcomes.fill(page, outcomes.kept(tmp_path))
    assert line_of(text, NAME).endswith("| 100 [a] |")
    assert "| 100 [a] | error: OutOfMemoryError: no room [a] |" in text
