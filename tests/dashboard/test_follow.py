"""A page that follows its store is drawn anew between what a person does, never in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_page_that_is_drawn_does_not_begin_anew_for_verdicts_that_just_came(
    draw: Callable[..., Any], stores: dict[str, Path], judged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("streamlit.rerun", lambda scope="app": begun.append(scope))
    page = draw("overview", stores["whole"])
    assert not page.exception
    for seen in (("another state", False), (judged.state, False)):
        page.session_state["judged seen"] = seen
        page.run()
        assert page.session_state["judged seen"] == (judged.state, True)
    assert begun == [], "what was clicked is lost where a run ends before its page"
