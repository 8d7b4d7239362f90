"""The address of a view: every filter stands in the URL, so that a link shows another person the same thing.

The URL is the only truth: each widget takes its value from it, and writes to it when it is moved. What is at its
default does not stand there, so that links stay short. Going to another page carries the shared filters along and
gives each page back what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import streamlit as st

#: Filters that mean the same on every page.
SHARED: Final = ("family", "technique", "workload", "variant", "dtype", "gpu", "metric")
LONGEST: Final = 400
MEMORY: Final = "pages as they were left"


def get(name: str) -> str | None:
    """A parameter of the URL; None when absent or empty."""
    value = st.query_params.get(name)
    return value[:LONGEST] if value else None


def get_all(name: str) -> list[str]:
    """A parameter that may stand several times."""
    return [value[:LONGEST] for value in st.query_params.get_all(name) if value]


def put(name: str, value: str | Sequence[str] | None) -> None:
    """Write a parameter; None or nothing removes it."""
    if value:
        st.query_params[name] = value
    elif name in st.query_params:
        del st.query_params[name]


def put_both(first: str, one: str | None, last: str, other: str | None) -> None:
    """Write two parameters at once, so that the browser's way back is one step."""
    found: dict[str, Any] = everything()
    for name, value in ((first, one), (last, other)):
        found.pop(name, None)
        if value:
            found[name] = value
    st.query_params.from_dict(found)


def remember(page: str) -> None:
    """Keep how a page was left, for the way back."""
    st.session_state.setdefault(MEMORY, {})[page] = {name: get_all(name) for name in st.query_params}


def query_for(page: str, **changes: str | Sequence[str] | None) -> dict[str, str | list[str]]:
    """The parameters of a link to a page: its own as they were left, the shared filters as they are now."""
    found: dict[str, Any] = dict(st.session_state.get(MEMORY, {}).get(page, {}))
    for name in SHARED:
        found.pop(name, None)
        if values := get_all(name):
            found[name] = values
    for name, value in changes.items():
        found.pop(name, None)
        if value:
            found[name] = value
    return found


def _key(name: str) -> str:
    return f"widget {name}"


def _moved(name: str, default: Any, write: Callable[[Any], str | Sequence[str] | None]) -> None:
    value = st.session_state[_key(name)]
    put(name, None if value == default else write(value))


def choose(
    label: str,
    name: str,
    options: Sequence[str],
    default: str | None = None,
    show: Callable[[str], str] = str,
    help: str | None = None,
) -> str | None:
    """One of several. Without a default nothing need be chosen (``all``); a value of the URL that is no option is kept
    and shown, so that the page can say that there is nothing of it."""
    value = get(name) or default
    known = list(options)
    if value is not None and value not in known:
        known.append(value)
    choices: list[str | None] = list(known) if default is not None else [None, *known]
    if not choices:
        return None
    st.session_state[_key(name)] = value

    def words(option: str | None) -> str:
        return "all" if option is None else show(option) if option in options else f"{option} (nothing recorded)"

    picked: str | None = st.selectbox(
        label,
        choices,
        key=_key(name),
        format_func=words,
        help=help,
        placeholder="all",
        on_change=_moved,
        args=(name, default, _same),
    )
    return picked


def choose_several(
    label: str, name: str, options: Sequence[str], default: Sequence[str] = (), help: str | None = None
) -> list[str]:
    """Any number of several."""
    chosen = get_all(name) or list(default)
    known = [*options, *(value for value in chosen if value not in options)]
    st.session_state[_key(name)] = chosen
    return list(
        st.multiselect(label, known, key=_key(name), help=help, on_change=_moved, args=(name, list(default), list))
    )


def switch(label: str, name: str, default: bool = False, help: str | None = None) -> bool:
    """On or off."""
    text = get(name)
    st.session_state[_key(name)] = default if text is None else text == "1"
    return bool(
        st.toggle(label, key=_key(name), help=help, on_change=_moved, args=(name, default, lambda on: "10"[not on]))
    )


def within(name: str, default: float, low: float, high: float) -> float:
    """A number of the URL; one that is none, or outside its bounds, becomes the default."""
    try:
        value = float(get(name) or default)
    except ValueError:
        return default
    return value if low <= value <= high else default


def number(
    label: str, name: str, default: float, low: float, high: float, step: float, help: str | None = None
) -> float:
    """A number within bounds, to be chosen."""
    value = within(name, default, low, high)
    st.session_state[_key(name)] = value
    return float(
        st.number_input(
            label,
            low,
            high,
            step=step,
            key=_key(name),
            help=help,
            on_change=_moved,
            args=(name, default, "{:g}".format),
        )
    )


def span(
    label: str, options: Sequence[str], first: str = "from", last: str = "to", newest: int = 200
) -> tuple[int, int]:
    """A stretch of ordered options, as the places of its ends; kept as two parameters. Unless they say otherwise it is
    the ``newest`` so many."""
    ends = [get(first), get(last)]
    start = max(0, len(options) - newest)
    places = [start, len(options) - 1]
    for at, end in enumerate(ends):
        if end is not None:
            found = [n for n, option in enumerate(options) if option.startswith(end)]
            if found:
                places[at] = found[0]
    if places[0] > places[1]:
        places.reverse()
    if len(options) < 3:
        return 0, len(options) - 1
    key = _key(first)
    chosen = (options[places[0]], options[places[1]])
    if st.session_state.get(key) != chosen:  # to give back what was moved there would undo the next key's move
        st.session_state[key] = chosen

    def moved() -> None:
        left, right = st.session_state[key]
        put_both(first, None if left == options[start] else left, last, None if right == options[-1] else right)

    # Only a first value of two ends tells the widget that it has two; without, it drops whatever is moved.
    st.select_slider(label, options, (options[0], options[-1]), key=key, on_change=moved)
    return places[0], places[1]


def _same(value: str | None) -> str | None:
    return value


def everything() -> dict[str, list[str]]:
    """Every parameter of the URL as it is."""
    return {name: get_all(name) for name in st.query_params}
