"""Replays requests against an OpenAI-compatible server and keeps their events, for the same figures as our own engine.

``POST <base>/completions`` with ``stream``: one thread a request, started at its arrival whatever came of the others
(open loop). The clock is the client's, so what is measured is what a user sees, the way there and back included.
Imports no torch.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from harness.errors import UsageError


@dataclass(frozen=True)
class Outgoing:
    """One request to send: token ids or text, how many tokens to ask for, and when (seconds from the start)."""

    id: str
    prompt: Sequence[int] | str
    max_tokens: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Endpoint:
    """A server. ``url`` is its base: http://host:8000 or http://host:8000/v1.

    model: empty asks the server which it has. ignore_eos: ask for exactly the tokens wanted (an extension that vLLM
    and SGLang know; a server that refuses unknown fields needs it off). extra: further fields of the body. timeout:
    seconds without a byte after which a request has failed.

    Raises:
        UsageError: the URL is not http or https with a host.
    """

    url: str
    model: str = ""
    ignore_eos: bool = True
    timeout: float = 300.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"endpoint {self.url!r}: give a base URL such as http://localhost:8000/v1")

    def connect(self) -> http.client.HTTPConnection:
        """A fresh connection."""
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=self.timeout, context=context)
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)

    def path(self, name: str) -> str:
        """The path of a resource below ``/v1``."""
        base = urlsplit(self.url).path.rstrip("/")
        return f"{base if base else '/v1'}/{name}"

    def served_model(self) -> str:
        """The model to ask for: the given one, or the first that the server lists.

        Raises:
            UsageError: nobody answers there, or what answers is not such a server.
        """
        connection = self.connect()
        try:
            connection.request("GET", self.path("models"), headers=dict(self.headers))
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise UsageError(f"endpoint {self.url}: GET {self.path('models')} answered {response.status}")
            listed = [str(entry["id"]) for entry in json.loads(body)["data"]]
        except (OSError, http.client.HTTPException) as err:
            raise UsageError(f"endpoint {self.url}: no answer ({err}); is the server running there?") from err
        except (ValueError, KeyError, TypeError) as err:
            raise UsageError(f"endpoint {self.url}: {self.path('models')} is not a list of models") from err
        finally:
            connection.close()
        if self.model:
            if self.model not in listed:
                raise UsageError(f"endpoint {self.url}: serves {', '.join(listed)}, not {self.model!r}")
            return self.model
        if not listed:
            raise UsageError(f"endpoint {self.url}: lists no model")
        return listed[0]


class StreamError(Exception):
    """A request that got no complete answer; the message is its reason."""


def replay(
    endpoint: Endpoint,
    requests: Sequence[Outgoing],
    max_concurrency: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """The timeline of a replay, as a serve case gives it.

    Args:
        max_concurrency: how many requests may be open at once; 0 sets no limit. A request that waits for its turn
            waits on its own time: TTFT counts from its arrival in the trace.

    Raises:
        UsageError: nobody answers at the endpoint, or two requests share an id.
    """
    ids = [request.id for request in requests]
    if len(set(ids)) != len(ids):
        raise UsageError("endpoint: two requests share an id")
    model = endpoint.served_model()
    gate = threading.Semaphore(max_concurrency) if max_concurrency > 0 else None
    events: dict[str, dict[str, Any]] = {}
    lock = threading.Lock()
    start = clock()

    def send(request: Outgoing) -> None:
        if gate is not None:
            gate.acquire()
        try:
            entry = _ask(endpoint, model, request, lambda: clock() - start)
        finally:
            if gate is not None:
                gate.release()
        with lock:
            events[request.id] = entry

    threads = []
    for request in sorted(requests, key=lambda r: r.arrival):
        wait = request.arrival - (clock() - start)
        if wait > 0:
            sleep(wait)
        thread = threading.Thread(target=send, args=(request,), name=f"endpoint-{request.id}", daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return {"requests": {key: events[key] for key in ids}, "start": 0.0, "end": clock() - start}


def _ask(endpoint: Endpoint, model: str, request: Outgoing, now: Callable[[], float]) -> dict[str, Any]:
    """Sends one request and follows its stream; what happened to it, failures included."""
    arrivals: list[tuple[float, int]] = []
    counted: list[int] = []
    status, reason = "finished", ""
    connection = endpoint.connect()
    try:
        _stream(endpoint, connection, model, request, now, arrivals, counted)
    except StreamError as err:
        status, reason = "failed", str(err)
    except (OSError, http.client.HTTPException) as err:
        status, reason = "failed", f"{type(err).__name__}: {err}" if str(err) else type(err).__name__
    finally:
        connection.close()
    times = token_times(arrivals, counted[-1] if counted else None)
    if status == "finished" and not times:
        status, reason = "failed", "the answer has no token"
    return {
        "arrival": request.arrival,
        "token_times": times,
        "finish": max(now(), request.arrival),
        "status": status,
        "reason": reason,
        "prompt_tokens": len(request.prompt) if not isinstance(request.prompt, str) else len(request.prompt.split()),
    }


def _stream(
    endpoint: Endpoint,
    connection: http.client.HTTPConnection,
    model: str,
    request: Outgoing,
    now: Callable[[], float],
    arrivals: list[tuple[float, int]],
    counted: list[int],
) -> None:
    """Appends (time, characters) of every message with text, and the server's own count of tokens."""
    prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if endpoint.ignore_eos else {}),
        **endpoint.extra,
    }
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **endpoint.headers}
    connection.request("POST", endpoint.path("completions"), json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise StreamError(f"HTTP {response.status}: {_message(response.read())}")
    while True:
        line = response.readline()
        at = now()
        if not line:
            raise StreamError("the stream ended before it was done")
        text = line.decode("utf-8", errors="replace").strip()
        if not text.startswith("data:"):
            continue
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            message = json.loads(data)
        except json.JSONDecodeError as err:
            raise StreamError(f"a message is not JSON: {err.msg}") from err
        if "error" in message:
            raise StreamError(_message(data.encode()))
        usage = message.get("usage") or {}
        if isinstance(usage.get("completion_tokens"), int):
            counted.append(usage["completion_tokens"])
        choices = message.get("choices") or ()
        arrivals.extend((at, len(choice["text"])) for choice in choices if choice.get("text"))


def token_times(arrivals: Sequence[tuple[float, int]], count: int | None) -> list[float]:
    """One time a token, from the messages of a stream.

    Servers do not say how many tokens a message carries; most send one, some several at once (speculative decoding).
    When the server's own count differs from the number of messages, the tokens are spread over the messages by the
    length of their text, at least one each while there are enough; without a count, a message is a token.
    """
    if not arrivals or count is None or count == len(arrivals):
        return [at for at, _ in arrivals]
    if count < len(arrivals):
        # More messages than tokens: a token's text came in parts (bytes of one character); the first part counts.
        picked = [arrivals[round(i * len(arrivals) / count)] for i in range(count)]
        return [at for at, _ in picked]
    total = sum(size for _, size in arrivals)
    spare = count - len(arrivals)
    out: list[float] = []
    seen = given = 0
    for at, size in arrivals:
        seen += size
        share = round(spare * seen / total) - given
        given += share
        out.extend([at] * (1 + share))
    return out


def _message(body: bytes) -> str:
    """The reason in an error's body, in one short line."""
    text = body.decode("utf-8", errors="replace")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text.strip()[:200] or "no body"
    if isinstance(found, Mapping):
        inner = found.get("error", found)
        if isinstance(inner, Mapping) and "message" in inner:
            return str(inner["message"])[:200]
        return str(inner)[:200]
    return text[:200]
