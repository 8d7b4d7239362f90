"""Starts the dashboard's server: local, without telemetry, and warm before the first browser comes."""

from __future__ import annotations

import importlib
import os
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

from harness.errors import UsageError
from harness.history.store import stores_to_read

APP: Final = Path(__file__).with_name("app.py")
#: Nothing is sent anywhere, no file is watched, and the page has no button that publishes it.
SETTINGS: Final[dict[str, Any]] = {
    "browser_gatherUsageStats": False,
    "server_fileWatcherType": "none",
    "server_runOnSave": False,
    "client_toolbarMode": "viewer",
    "theme_light_primaryColor": "#0072B2",
    "theme_dark_primaryColor": "#56B4E9",
    "global_developmentMode": False,
    # Widgets take their value from the address, whatever the first one is that tells their kind.
    "global_disableWidgetStateDuplicationWarning": True,
}
VIEWS: Final = ("overview", "technique", "history", "regressions", "compare", "serving", "scaling", "runs")


def serve(
    store: str | None, port: int, host: str = "127.0.0.1", branch: str = "HEAD", open_browser: bool = False
) -> None:
    """Serve until it is stopped.

    Raises:
        UsageError: Streamlit is not installed, or the port is taken.
        StoreError: the named store does not exist.
    """
    try:
        bootstrap = importlib.import_module("streamlit.web.bootstrap")
        importlib.import_module("plotly")
    except ModuleNotFoundError as err:
        raise UsageError(f"the dashboard needs {err.name}: pip install 'pairbench[dashboard]'") from err
    stores_to_read(store)
    _free(host, port)
    os.environ["PAIRBENCH_DASHBOARD_STORE"] = store or ""
    os.environ["PAIRBENCH_DASHBOARD_BRANCH"] = branch
    options = {
        **SETTINGS,
        "server_port": port,
        "server_address": host,
        "browser_serverAddress": host,
        "server_headless": not open_browser,
    }
    threading.Thread(target=_warm, args=(store, branch), daemon=True).start()
    bootstrap.load_config_options(options)
    bootstrap.run(str(APP), False, [], options)


def _free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            raise UsageError(f"port {port} on {host} cannot be used ({err.strerror}): name another --port") from err


def _warm(store: str | None, branch: str) -> None:
    """Open the history, import what the pages need and ask what they ask first, while the server starts."""
    from dashboard import queries
    from dashboard.source import open_source
    from harness.history import query
    from harness.regress.compare import compare

    source = open_source(store, branch)
    for name in VIEWS:
        importlib.import_module(f"dashboard.views.{name}")
    if source.history is None or not source.state:
        return
    source.once("any", queries.any_measurement)
    source.once("coverage", queries.coverage)
    source.once("last runs", queries.last_runs)
    source.judge()
    source.once("facets", query.facets)
    source.once("runs", queries.all_runs)
    source.once("selections", queries.selections)
    queries.keys_of(source.history, {}, "latency")
    for row in source.once("last runs", queries.last_runs):
        source.once(f"ceilings {row['gpu']}", partial(queries.newest_ceilings, gpu=row["gpu"]))
    pair = source.once("compared", queries.compared)
    if pair is not None:  # what every comparison asks first: how noisy each series is
        compare(source.history, *pair, ["latency"])
