"""Replays requests against an OpenAI-compatible server and keeps their events, for the same figures as our own engine.

``POST <base>/completions`` with ``stream``: one thread a request, started at its arrival whatever came of the others
(open loop). The clock is the client's, so what is measured is what a user sees, the way there and back included.
Whatever nonsense a server answers costs the request that it answers, with a reason. Imports no torch.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from harness.errors import UsageError

#: Bytes of a line or of an error's body; what is longer is no stream of tokens.
LONGEST_LINE: Final = 1 << 20
#: Messages that a server may send for each token asked for: a token may come in parts, but not in any number.
MESSAGES_A_TOKEN: Final = 8


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
    seconds without a message after which a request has failed.

    Raises:
        UsageError: the URL is not http or https with a host, or a header holds a line break.
    """

    url: str
    model: str = ""
    ignore_eos: bool = True
    timeout: float = 300.0
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise UsageError(f"endpoint {self.url!r}: give a base URL such as http://localhost:8000/v1")
        for name, value in self.headers.items():
            if not value.isprintable():
                raise UsageError(f"endpoint {self.url}: no header can carry the {name} given, which has a line break")

    @property
    def shown(self) -> str:
        """The URL for others to read: without a name and password that it may have."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

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
        except (ValueError, KeyError, TypeError, RecursionError) as err:
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
        max_concurrency: how many requests may be open at once; 0 sets no limit. They are sent in order of arrival, and
            one that waits for its turn waits on its own time: TTFT counts from its arrival in the trace.

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
        if gate is not None:
            gate.acquire()
        threads.append(threading.Thread(target=send, args=(request,), name=f"endpoint-{request.id}", daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return {"requests": {key: events[key] for key in ids}, "start": 0.0, "end": clock() - start}


def _ask(endpoint: Endpoint, model: str, request: Outgoing, now: Callable[[], float]) -> dict[str, Any]:
    """Sends one request and follows its stream; what happened to it, failures included."""
    heard, sent = Heard(), now()
    status, reason = "finished", ""
    connection = endpoint.connect()
    try:
        _stream(endpoint, connection, model, request, now, heard)
    except StreamError as err:
        status, reason = "failed", str(err)
    except (OSError, http.client.HTTPException, ValueError) as err:
        status, reason = "failed", f"{type(err).__name__}: {err}"[:200] if str(err) else type(err).__name__
    finally:
        connection.close()
    count = heard.count
    if count is not None and count > request.max_tokens:
        status, reason = "failed", f"the server says that it sent {count} tokens, {request.max_tokens} were asked for"
        count = None
    if count is None and len(heard.arrivals) > request.max_tokens:
        count = request.max_tokens
    times = token_times(heard.arrivals, count)
    if status == "finished" and not times:
        status, reason = "failed", "the answer has no token"
    prompt = heard.prompt or len(request.prompt.split()) if isinstance(request.prompt, str) else len(request.prompt)
    return {
        "arrival": request.arrival,
        "sent": sent,
        "token_times": times,
        "finish": max(now(), request.arrival),
        "status": status,
        "reason": reason,
        "prompt_tokens": prompt,
        **({"cached_tokens": heard.cached} if heard.cached is not None and heard.cached <= prompt else {}),
    }


@dataclass
class Heard:
    """What came on a stream: (time, characters) of every message with text, and the server's own counts of tokens.

    ``cached``: prompt tokens that its prefix cache had, of servers that say so.
    """

    arrivals: list[tuple[float, int]] = field(default_factory=list)
    count: int | None = None
    prompt: int = 0
    cached: int | None = None

    def take(self, data: str, at: float) -> None:
        """One message.

        Raises:
            StreamError: it is none, or tells of an error.
        """
        try:
            message = json.loads(data)
        except (ValueError, RecursionError) as err:
            raise StreamError(f"a message is not JSON: {getattr(err, 'msg', err)}") from err
        if not isinstance(message, Mapping):
            raise StreamError(f"a message is not a JSON object: {data[:60]}")
        if message.get("error"):
            raise StreamError(_message(data.encode()))
        usage = message.get("usage")
        if isinstance(usage, Mapping):
            answer, prompt = (_count(usage.get(f"{part}_tokens")) for part in ("completion", "prompt"))
            self.count = self.count if answer is None else answer
            self.prompt = prompt or self.prompt
            details = usage.get("prompt_tokens_details")
            if isinstance(details, Mapping):
                self.cached = _count(details.get("cached_tokens"))
        choices = message.get("choices") or ()
        if not isinstance(choices, Sequence) or not all(isinstance(choice, Mapping) for choice in choices):
            raise StreamError(f"a message's choices are not a list of objects: {data[:60]}")
        for choice in choices:
            text = choice.get("text")
            if isinstance(text, str) and text:
                self.arrivals.append((at, len(text)))


def _count(said: Any) -> int | None:
    return said if isinstance(said, int) and not isinstance(said, bool) and said >= 0 else None


def _stream(
    endpoint: Endpoint,
    connection: http.client.HTTPConnection,
    model: str,
    request: Outgoing,
    now: Callable[[], float],
    heard: Heard,
) -> None:
    """Sends a request and listens to the end of its stream."""
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
        raise StreamError(f"HTTP {response.status}: {_message(response.read(LONGEST_LINE))}")
    last = now()
    while True:
        line = response.readline(LONGEST_LINE)
        at = now()
        if not line:
            raise StreamError("the stream ended before it was done")
        if len(line) == LONGEST_LINE:
            raise StreamError(f"a line of more than {LONGEST_LINE} bytes")
        text = line.decode("utf-8", errors="replace").strip()
        if not text.startswith("data:"):
            # Comments keep a connection alive, and do so for ever.
            if at - last > endpoint.timeout:
                raise StreamError(f"no message for {endpoint.timeout:g} s")
            continue
        last = at
        data = text.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        heard.take(data, at)
        if len(heard.arrivals) > MESSAGES_A_TOKEN * request.max_tokens:
            raise StreamError(f"more than {len(heard.arrivals) - 1} messages for {request.max_tokens} tokens")


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
    except (ValueError, RecursionError):
        return text.strip()[:200] or "no body"
    if isinstance(found, Mapping):
        inner = found.get("error", found)
        if isinstance(inner, Mapping) and "message" in inner:
            return str(inner["message"])[:200]
        return str(inner)[:200]
    return text[:200]
