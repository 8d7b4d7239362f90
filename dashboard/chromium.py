"""The browser that pictures are taken with and pages are timed in."""

from __future__ import annotations

import shutil
import sys
from typing import Any, Final

ARGUMENTS: Final = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
                    "--disable-component-update", "--disable-sync", "--no-first-run"]  # fmt: skip


def browser_here() -> tuple[Any, str] | None:
    """Playwright's entry and a Chromium; None, and said on standard error, where one of them is missing."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        print("Playwright is not installed: pip install playwright", file=sys.stderr)
        return None
    if chromium is None:
        print("no chromium here: apt-get install chromium", file=sys.stderr)
        return None
    return sync_playwright, chromium
