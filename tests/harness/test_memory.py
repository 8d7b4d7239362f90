"""The memory pass: what the collector has to look at."""

from __future__ import annotations

import gc
import weakref

from harness import memory


def test_what_is_imported_is_not_collected_again_but_what_comes_later_is() -> None:
    class Held:
        pass

    try:
        memory.keep_imports()
        assert gc.get_freeze_count() > 1000
        held = Held()
        held.itself = held  # type: ignore[attr-defined]
        gone = weakref.ref(held)
        del held
        memory.trim()
        assert gone() is None
    finally:
        gc.unfreeze()
