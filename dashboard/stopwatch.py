"""How long a person waits: from the browser's navigation until everything of a page is drawn, and for each filter.

python -m dashboard.stopwatch --store FOLDER [--visits 5] [--json]

Starts the command's own server over the store, and another over an empty one, which shows what Streamlit and the
browser need by themselves; each visit asks both, in turn, so that both meet the same load. Browser and servers share
the machine. Needs Playwright and a chromium.

A first page is opened in a browser that has nothing of it in its cache. A page is drawn when its script has ended, no
placeholder is left, every table stands there and every figure that is in the window or near it, and neither the
document nor a long task (50 ms or more) has moved for :data:`QUIET_MS`, which does not count. A filter runs from its
click.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dashboard.chromium import ARGUMENTS, browser_here

PAGES: Final = ("overview", "technique", "history", "regressions", "compare", "serving", "scaling", "runs")
#: Page → labels of the filters that are moved on it, each to an option that it did not have.
FILTERS: Final = {
    "overview": ("GPU type", "Family", "Speedup over"),
    "technique": ("Technique", "GPU type", "Speedup over"),
    "history": ("Technique", "Metric", "Workload"),
    "regressions": ("Technique", "GPU type", "Sort"),
    "compare": ("Technique", "GPU type", "Metric"),
    "serving": ("GPU type",),
    "scaling": ("GPU type",),
    "runs": ("GPU type",),
}
#: From linux/prctl.h.
PR_SET_PDEATHSIG: Final = 1
QUIET_MS: Final = 700
#: Seconds for a server to make all verdicts: a million records on two cores that do other things as well take minutes.
IDLE_S: Final = 900.0
WAIT_MS: Final = 120_000
#: Keeps the time of the last change of the document's main part and of the end of the last long task.
WATCH: Final = """(() => {
    window.watched = {last: 0, from: 0, first: 0};
    const main = node => (node.nodeType == 1 ? node : node.parentElement)?.closest('[data-testid="stMain"]');
    new MutationObserver(found => {
        if (found.some(one => main(one.target))) watched.last = performance.now();
        if (!watched.first && document.querySelector('[data-testid="stMain"] h1')) watched.first = performance.now();
    }).observe(document, {subtree: true, childList: true, attributes: true, characterData: true});
    new PerformanceObserver(list => {
        for (const task of list.getEntries()) watched.last = Math.max(watched.last, task.startTime + task.duration);
    }).observe({type: "longtask", buffered: true});
})()"""
DRAWN: Final = """quiet => {
    const all = name => [...document.querySelectorAll(`[data-testid="${name}"]`)];
    const apps = all("stApp");
    return apps.length > 0 && apps.every(app => app.dataset.testScriptState == "notRunning")
        && document.querySelector('[data-testid="stMain"] h1')
        && all("stSkeleton").length == 0
        && [...document.querySelectorAll(".plot")].every(one => one.dataset.seen == "no" || "drawn" in one.dataset)
        && all("stBidiComponentIsolated").every(one => !one.shadowRoot?.querySelector(".frame")
            || one.shadowRoot.querySelector("td, p"))
        && all("stDataFrame").every(table => table.querySelector("canvas"))
        && watched.last > watched.from && performance.now() - watched.last > quiet;
}"""


@contextlib.contextmanager
def serving(store: Path, log: Path) -> Iterator[str]:
    """The address of a server over a store, which is warm: it answers, and it idles."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "harness", "dashboard", "--store", str(store), "--port", str(port)]
    with log.open("w") as out:
        server = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=Path(__file__).parents[1], start_new_session=True, preexec_fn=_with_me
        )
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2).read()
                break
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        _idle(server.pid)
        yield f"http://127.0.0.1:{port}"
        print(f"memory of the server at most: {_peak(server.pid) / 1024:.0f} MiB", file=sys.stderr)
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End a server and what it started: the processes of its own session."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(10)


def _with_me() -> None:
    """In a server before it begins: it ends with this process, even where that is killed outright (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _stopped(number: int, frame: object) -> None:
    """A signal ends the measurement as an error would: servers and browser go, and the exit status says why."""
    raise SystemExit(128 + number)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _peak(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def _idle(pid: int) -> None:
    """Wait until a server is warm and every verdict is in: no process judges, and for two seconds it used no CPU."""
    before, quiet, until = _cpu_s(pid), 0, time.monotonic() + IDLE_S
    while quiet < 2:
        if time.monotonic() > until:
            raise SystemExit(f"the server is still busy after {IDLE_S:.0f} s: verdicts are made, or it never idles")
        time.sleep(1)
        now = _cpu_s(pid)
        helpers = any(path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/children"))
        quiet = 0 if helpers or now - before > 0.1 else quiet + 1
        before = now


def _wait(page: Any) -> dict[str, float]:
    page.wait_for_function(DRAWN, arg=QUIET_MS, timeout=WAIT_MS)
    found: dict[str, float] = page.evaluate(
        """() => ({drawn: (watched.last - watched.from) / 1000, head: (watched.first - watched.from) / 1000,
                   elements: document.querySelectorAll('[data-testid="stElementContainer"]').length})"""
    )
    return found


def first(browser: Any, address: str) -> dict[str, float]:
    """Open a page in a browser that knows nothing of it."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(address, wait_until="commit")
    found = _wait(page)
    context.close()
    return found


def moved(browser: Any, address: str, name: str, visits: int) -> dict[str, list[float]]:
    """Seconds from the click on an option of each filter of a page until it is drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.add_init_script(WATCH)
    page.goto(address, wait_until="commit")
    _wait(page)
    took: dict[str, list[float]] = {}
    for label in FILTERS[name]:
        for turn in range(visits):
            box = page.get_by_test_id("stMain").get_by_test_id("stSelectbox").filter(has_text=label).first
            if not box.count():
                break
            options = _options(page, box)
            option = options.nth(1 + turn % (options.count() - 1))
            if option.get_attribute("aria-selected") == "true":
                option = options.nth(0)
            page.wait_for_timeout(300)
            option.evaluate(
                "one => one.addEventListener('click', () => { watched.from = performance.now(); }, {capture: true})"
            )
            option.click()
            took.setdefault(label, []).append(_wait(page)["drawn"])
    context.close()
    return took


def _options(page: Any, box: Any) -> Any:
    """The options of a select box, opened; a page that draws itself anew may close it."""
    options = page.get_by_role("option")
    for _ in range(10):
        box.get_by_role("combobox").click()
        page.wait_for_timeout(400)
        if options.count():
            return options
    raise SystemExit(f"a filter does not open at {page.url}")


def measure(browser: Any, addresses: dict[str, str], visits: int, pages: tuple[str, ...]) -> dict[str, Any]:
    """Seconds by page of first visits over each store, and of filters over the store that is not empty."""
    opened: dict[str, dict[str, list[dict[str, float]]]] = {name: {store: [] for store in addresses} for name in pages}
    for _ in range(visits):
        for name in pages:
            for store, address in addresses.items():
                opened[name][store].append(first(browser, f"{address}/{'' if name == 'overview' else name}"))
    path = {name: "" if name == "overview" else name for name in pages}
    filters = {name: moved(browser, f"{addresses['store']}/{path[name]}", name, visits) for name in pages}
    return {"first": opened, "filters": filters}


def report(found: dict[str, Any]) -> str:
    """A table in Markdown: medians, and the slowest beside them."""

    def words(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} (at most {max(values):.2f})" if values else "–"

    lines = ["| page | elements | title, s | all drawn, s | the same, empty store, s | filters, s |",
             "| --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, stores in found["first"].items():
        visits = stores["store"]
        filters = "; ".join(f"{label} {words(values)}" for label, values in found["filters"][name].items())
        lines.append(
            f"| {name} | {visits[0]['elements']:.0f} | {words([v['head'] for v in visits])} | "
            f"{words([v['drawn'] for v in visits])} | {words([v['drawn'] for v in stores['empty']])} | {filters} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Measures, and prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", type=Path, required=True, help="a folder, as of `pairbench history generate`")
    parser.add_argument("--visits", type=int, default=5, help="first visits of each page, and moves of each filter")
    parser.add_argument("--page", action="append", choices=PAGES, help="this page only; may stand several times")
    parser.add_argument("--json", action="store_true", help="every single time")
    asked = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stopped)
    here = browser_here()
    if here is None:
        return 2
    sync_playwright, chromium = here
    with tempfile.TemporaryDirectory() as made, contextlib.ExitStack() as stack:
        (empty := Path(made) / "empty").mkdir()
        addresses = {
            "store": stack.enter_context(serving(asked.store, Path(made) / "store.log")),
            "empty": stack.enter_context(serving(empty, Path(made) / "empty.log")),
        }
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        found = measure(browser, addresses, asked.visits, tuple(asked.page or PAGES))
        found["load"], found["cores"] = os.getloadavg(), len(os.sched_getaffinity(0))
        browser.close()
    print(json.dumps(found, indent=1) if asked.json else report(found))
    print(f"\nLoad of {found['cores']} cores after it: {found['load'][0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
