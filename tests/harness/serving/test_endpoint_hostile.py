"""The client against servers that answer nonsense, trickle, stall or hang up: each costs its own request alone."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from harness.errors import UsageError
from harness.serving.endpoint import Endpoint, Outgoing, replay
from harness.serving.metrics import summarize
from harness.serving.peer import PeerResult, outgoing
from harness.serving.peer_runner import cut_short
from harness.serving.trace import Trace, TraceRequest

OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def said(message: object) -> bytes:
    return f"data: {json.dumps(message)}\n\n".encode()


WORD = said({"choices": [{"text": "word "}]})

#: What is answered, byte for byte, to a prompt that begins with the place in this list.
ANSWERS: list[tuple[bytes, int, str]] = [
    (OK + WORD * 3 + said({"usage": {"completion_tokens": 3}}) + DONE, 3, ""),
    (OK + WORD + b"data: 5\n\n" + DONE, 1, "a message is not a JSON object: 5"),
    (OK + WORD + b"data: null\n\n" + DONE, 1, "a message is not a JSON object: null"),
    (OK + WORD + b'data: {"choices": [{"te\n\n' + DONE, 1, "a message is not JSON: Unterminated string"),
    (OK + WORD + b"data: " + b"[" * 90_000 + b"\n\n" + DONE, 1, "a message is not JSON: maximum recursion"),
    (OK + WORD + said({"choices": 5}) + DONE, 1, "a message's choices are not a list of objects"),
    (OK + WORD + said({"choices": [5]}) + DONE, 1, "a message's choices are not a list of objects"),
    (OK + WORD * 3 + said({"choices": [{"text": 5}]}) + said({"usage": 5}) + DONE, 3, ""),
    (OK + WORD * 3 + said({"error": None, "choices": None, "usage": None}) + DONE, 3, ""),
    (OK + WORD * 3 + said({"usage": {"completion_tokens": 10**9}}) + DONE, 3, "says that it sent 1000000000 tokens, 3"),
    (OK + WORD * 3 + said({"usage": {"completion_tokens": -4}}) + DONE, 3, ""),
    (OK + WORD * 5 + DONE, 3, ""),
    (OK + WORD * 1000 + DONE, 3, "more than 24 messages for 3 tokens"),
    (OK + WORD + b"x" * (1 << 20) + b"\n" + DONE, 1, "a line of more than 1048576 bytes"),
    (OK + DONE, 0, "the answer has no token"),
    (OK + WORD, 1, "the stream ended before it was done"),
    (OK.replace(b"\r\n\r\n", b"\r\nContent-Length: 999\r\n\r\n") + WORD, 1, "ended before it was done"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 0, "the stream ended before it was done"),
    (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nlate", 0, "HTTP 503: late"),
    (b"SSH-2.0-OpenSSH_9.2\r\n", 0, "BadStatusLine"),
    (b"", 0, "RemoteDisconnected"),
]


class Raw:
    """Answers the list of models, and every request with what ``answer`` sends on its socket."""

    def __init__(self, answer: Callable[[socket.socket, list[int]], None]) -> None:
        self.answer = answer
        self.order: list[int] = []
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while b"\r\n\r\n" not in data:
                data += connection.recv(65536)
            head, _, body = data.partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                models = b'{"data": [{"id": "raw"}]}'
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
                return
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            while len(body) < length:
                body += connection.recv(65536)
            prompt = json.loads(body)["prompt"]
            self.order.append(prompt[0])
            # The client hangs up when it has heard enough.
            with contextlib.suppress(OSError):
                self.answer(connection, prompt)


@pytest.fixture
def raw() -> Iterator[Callable[[Callable[[socket.socket, list[int]], None]], Raw]]:
    made: list[Raw] = []

    def start(answer: Callable[[socket.socket, list[int]], None]) -> Raw:
        made.append(Raw(answer))
        return made[-1]

    yield start
    for server in made:
        server.listener.close()


def test_nonsense_costs_the_request_that_it_answers(raw: Callable[..., Raw]) -> None:
    server = raw(lambda connection, prompt: connection.sendall(ANSWERS[prompt[0]][0]))
    requests = [Outgoing(str(i), [i], 3) for i in range(len(ANSWERS))]
    timeline = replay(Endpoint(server.url, timeout=20.0), requests)
    for i, (_, tokens, reason) in enumerate(ANSWERS):
        entry = timeline["requests"][str(i)]
        assert entry["status"] == ("failed" if reason else "finished"), (i, entry)
        assert reason in entry["reason"], (i, entry)
        if tokens <= 3:
            assert len(entry["token_times"]) == tokens, (i, entry)
    summary = summarize(timeline)
    assert summary.serve["requests"]["total"] == len(ANSWERS)
    assert summary.serve["requests"]["finished"] == sum(not reason for _, _, reason in ANSWERS)


def test_a_texts_tokens_are_those_that_the_server_counts(raw: Callable[..., Raw]) -> None:
    counts = {"a": {"completion_tokens": 2, "prompt_tokens": 17}, "b": {"completion_tokens": 2}}

    def answer(connection: socket.socket, prompt: str) -> None:
        connection.sendall(OK + WORD * 2 + said({"usage": counts[prompt[0]]}) + DONE)

    timeline = replay(Endpoint(raw(answer).url), [Outgoing("a", "a few words", 2), Outgoing("b", "b few words", 2)])
    assert [entry["prompt_tokens"] for entry in timeline["requests"].values()] == [17, 3]


def test_cached_prompt_tokens_are_those_that_the_server_tells_of(raw: Callable[..., Raw]) -> None:
    told = [{"prompt_tokens_details": {"cached_tokens": n}} for n in (2, 3, -1, "2")]
    told += [{"prompt_tokens_details": None}, {}]

    def answer(connection: socket.socket, prompt: list[int]) -> None:
        connection.sendall(OK + WORD + said({"usage": {"completion_tokens": 1, **told[prompt[0]]}}) + DONE)

    requests = [Outgoing(str(i), [i, 1], 1) for i in range(len(told))]
    timeline = replay(Endpoint(raw(answer).url, timeout=5.0), requests)
    # Three of a prompt of two are no count.
    assert [entry.get("cached_tokens") for entry in timeline["requests"].values()] == [2, *[None] * 5]
    assert "cache_hit_rate" in summarize(timeline).missing
    only = {"requests": {"0": timeline["requests"]["0"]}}
    assert summarize(only).metrics["cache_hit_rate"]["value"] == 1.0


def test_a_server_that_only_keeps_the_connection_alive_is_given_up(raw: Callable[..., Raw]) -> None:
    def trickle(connection: socket.socket, prompt: list[int]) -> None:
        connection.sendall(OK + WORD)
        for _ in range(200 if prompt[0] else 0):
            connection.sendall(b": still here\n\n")
            time.sleep(0.02)
        time.sleep(0.0 if prompt[0] else 2.0)

    began = time.monotonic()
    timeline = replay(Endpoint(raw(trickle).url, timeout=0.3), [Outgoing("alive", [1], 3), Outgoing("mute", [0], 3)])
    assert time.monotonic() - began < 2.0
    assert timeline["requests"]["alive"]["reason"] == "no message for 0.3 s"
    assert timeline["requests"]["mute"]["reason"] == "TimeoutError: timed out"
    assert [len(entry["token_times"]) for entry in timeline["requests"].values()] == [1, 1]


def test_a_slow_server_holds_nobody_back(raw: Callable[..., Raw]) -> None:
    def slow(connection: socket.socket, prompt: list[int]) -> None:
        time.sleep(0.4)
        connection.sendall(OK + WORD * 2 + DONE)

    requests = [Outgoing(str(i), [i], 2, arrival=0.02 * i) for i in range(10)]
    timeline = replay(Endpoint(raw(slow).url), requests)
    # Ten answers of 0.4 s each, sent over 0.18 s: nobody waited for another.
    assert 0.5 < timeline["end"] < 2.0
    for request in requests:
        first = timeline["requests"][request.id]["token_times"][0]
        assert 0.4 <= first - request.arrival < 1.5


def test_who_waits_for_a_turn_is_sent_in_order_of_arrival(raw: Callable[..., Raw]) -> None:
    def quick(connection: socket.socket, prompt: list[int]) -> None:
        time.sleep(0.01)
        connection.sendall(OK + WORD + DONE)

    server = raw(quick)
    requests = [Outgoing(str(i), [i], 1, arrival=0.002 * i) for i in range(40)]
    timeline = replay(Endpoint(server.url), requests, max_concurrency=1)
    assert server.order == list(range(40))
    assert {entry["status"] for entry in timeline["requests"].values()} == {"finished"}


def test_answers_that_are_shorter_than_asked_for_are_counted(raw: Callable[..., Raw]) -> None:
    server = raw(lambda connection, prompt: connection.sendall(OK + WORD * 2 + DONE))
    trace = Trace("t", tuple(TraceRequest(0.0, 1, length) for length in (1, 2, 3, 4)))
    timeline = replay(Endpoint(server.url), outgoing(trace))
    result = PeerResult(timeline["end"], timeline, summarize(timeline), trace)
    assert result.summary.serve["requests"]["output_tokens"] == 1 + 2 + 2 + 2
    assert cut_short(result) == 2


def test_a_url_that_is_none_is_bad_use() -> None:
    for url in ("http://h:port", "http://h:99999", "http://[::1", "http://", "ftp://h", "http://h:0", ""):
        with pytest.raises(UsageError, match="base URL"):
            Endpoint(url)


def test_a_key_that_no_header_can_carry_is_bad_use_and_is_not_shown() -> None:
    with pytest.raises(UsageError, match="no header can carry the Authorization given") as caught:
        Endpoint("http://h", headers={"Authorization": "Bearer secret\n"})
    assert "secret" not in str(caught.value)
