"""Pictures of the main pages of a dashboard that is running, for the documentation.

python -m dashboard.screenshots http://127.0.0.1:8501 docs/screenshots [--shot overview]

Needs Playwright and a chromium. Made-up records (``pairbench history generate``) name themselves so in their commits.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path
from typing import Any, Final

from PIL import Image

from dashboard.chromium import ARGUMENTS, browser_here

#: Name → page, width, height, colour scheme.
SHOTS: Final = {
    "overview": ("", 1280, 860, "light"),
    "technique": ("technique", 1280, 860, "light"),
    "history": ("history", 1280, 1180, "light"),
    "regressions": ("regressions", 1280, 720, "dark"),
    "compare": ("compare", 1280, 860, "light"),
    "phone": ("", 390, 844, "dark"),
}
#: Chosen to reach all of a picture's colours: a mark that is small keeps its own.
COLOURS: Final = 128
#: The script has ended, no placeholder is left, every figure is there, and every verdict is in.
DRAWN: Final = """() => {
    const all = name => [...document.querySelectorAll(`[data-testid="${name}"]`)];
    return all("stApp").every(app => app.dataset.testScriptState == "notRunning")
        && all("stStatusWidget").length + all("stSkeleton").length == 0
        && [...document.querySelectorAll(".plot")].every(one => one.dataset.seen == "no" || "drawn" in one.dataset)
        && !document.body.textContent.includes("Judging the series");
}"""
WAIT_MS: Final = 300_000


def take(browser: Any, address: str, page: str, width: int, height: int, scheme: str, target: Path) -> None:
    """One picture, after the page is drawn."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened = context.new_page()
    opened.goto(f"{address}/{page}")
    opened.wait_for_selector("h1", timeout=WAIT_MS)
    opened.wait_for_function(DRAWN, timeout=WAIT_MS)
    opened.wait_for_timeout(2500)  # figures and tables draw themselves after the page says that it is done
    opened.wait_for_function(DRAWN, timeout=WAIT_MS)
    picture = Image.open(io.BytesIO(opened.screenshot())).convert("RGB")
    # A documentation's picture is no photograph.
    picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE).save(target, optimize=True)
    context.close()


def main() -> int:
    """Takes all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("address", help="where the dashboard is")
    parser.add_argument("folder", type=Path, help="where the pictures go; those of the same names are replaced")
    parser.add_argument("--query", action="append", default=[], metavar="PAGE?NAME=VALUE", help="filters of a page")
    parser.add_argument("--shot", action="append", choices=SHOTS, help="this picture only; may stand several times")
    asked = parser.parse_args()
    found = browser_here()
    if found is None:
        return 2
    sync_playwright, chromium = found
    asked.folder.mkdir(parents=True, exist_ok=True)
    queries = {word.partition("?")[0]: word for word in asked.query}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        for name, (page, width, height, scheme) in SHOTS.items():
            if asked.shot and name not in asked.shot:
                continue
            target = asked.folder / f"{name}.png"
            take(browser, asked.address.rstrip("/"), queries.get(name, page), width, height, scheme, target)
            print(target)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
