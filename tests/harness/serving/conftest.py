"""A small server that streams like an OpenAI-compatible one, and misbehaves when it is asked to."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Handler(BaseHTTPRequestHandler):
    """Answers with one word a token; the prompt's first id says how."""

    protocol_version = "HTTP/1.1"
    seen: list[dict[str, Any]]

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "small"}, {"id": "other"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:  # type: ignore[attr-defined]
            self.server.seen.append({**asked, "path": self.path})  # type: ignore[attr-defined]
            place = len(self.server.seen)  # type: ignore[attr-defined]
        kind = 500 if self.server.broken else asked["prompt"][0]  # type: ignore[attr-defined]
        if self.server.some_fail:  # type: ignore[attr-defined]
            kind = 3 if place % 5 in (2, 4) else 1
        if kind == 500:
            body = b'{"error": {"message": "out of blocks"}}'
            self.send_response(500)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        step = 2 if kind == 2 else 1
        for start in range(0, asked["max_tokens"], step):
            time.sleep(0.02)
            if kind == 3 and start >= 2:
                return
            if kind == 4 and start >= 2:
                self.say({"error": {"message": "worker died"}})
                return
            words = "".join("word " for _ in range(min(step, asked["max_tokens"] - start)))
            self.say({"choices": [{"text": words}]})
        self.wfile.write(b": a comment\n\n")
        self.say({"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, message: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())
        self.wfile.flush()


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.lock = threading.Lock()  # type: ignore[attr-defined]
    made.seen, made.broken, made.some_fail = [], False, False  # type: ignore[attr-defined]
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()
