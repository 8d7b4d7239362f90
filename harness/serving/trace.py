"""What a request trace is, and how it is fitted to the model and the machine at hand."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import Final

from harness.errors import UsageError

#: How many refusals a message spells out.
SPELLED: Final = 5


@dataclass(frozen=True)
class TraceRequest:
    """One request: when it is sent (seconds from the trace's start) and how long it is (tokens).

    prefix_blocks: ids of the prompt's leading blocks; two prompts with equal leading ids share that much text.
    text: the prompt itself, where the trace has it.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()
    text: str | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival.

    prefix_block_tokens: prompt tokens that one of ``prefix_blocks`` stands for; 0 when the trace has none.
    refused: one message a row that could not be used, with file and line.
    clipped: requests whose lengths a limit cut.
    digest: of the requests as they will be sent, whatever file they came from.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    prefix_block_tokens: int = 0
    refused: tuple[str, ...] = ()
    clipped: int = 0
    note: str = ""
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        sha = hashlib.sha256(str(self.prefix_block_tokens).encode())
        for r in self.requests:
            sha.update(f"{r.arrival:.6f},{r.prompt_tokens},{r.output_tokens},{r.prefix_blocks},{r.text!r};".encode())
        object.__setattr__(self, "digest", sha.hexdigest()[:16])

    @property
    def duration(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    @property
    def rate(self) -> float:
        """Mean arrivals a second; inf when all arrive at once."""
        return (len(self.requests) - 1) / self.duration if self.duration > 0 else math.inf

    def describe(self) -> str:
        """One line on what was loaded, and the first of what was refused."""
        said = f"{self.name}: {len(self.requests)} requests over {self.duration:.1f} s"
        if self.clipped:
            said += f", {self.clipped} clipped"
        if self.refused:
            shown = "; ".join(self.refused[:SPELLED])
            said += f", {len(self.refused)} rows refused ({shown}{'; …' if len(self.refused) > SPELLED else ''})"
        return said + (f"; {self.note}" if self.note else "")


@dataclass(frozen=True)
class Shape:
    """How a trace is fitted to the model and the machine at hand.

    time_scale: arrival times are multiplied by it: 0.5 sends twice as fast.
    length_scale: prompt and output lengths are multiplied by it (at least one token stays).
    limit: the first so many requests; 0 takes all.
    max_prompt, max_output: longer ones are clipped, and counted; 0 sets no limit.
    request_rate: mean requests a second; times are stretched to it, so that bursts stay bursts. 0 keeps the times.
    """

    time_scale: float = 1.0
    length_scale: float = 1.0
    limit: int = 0
    max_prompt: int = 0
    max_output: int = 0
    request_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("time_scale", "length_scale"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise UsageError(f"trace: {name} must be a positive number, got {getattr(self, name)!r}")
        for name in ("limit", "max_prompt", "max_output", "request_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError(f"trace: {name} must not be negative, got {getattr(self, name)!r}")


def fit(trace: Trace, shape: Shape) -> Trace:
    """The trace with scales and limits applied; its first arrival becomes 0.

    Raises:
        UsageError: a rate for several requests that all have one time, which nothing can stretch.
    """
    requests = trace.requests[: shape.limit] if shape.limit else trace.requests
    if not requests:
        return trace
    first, last = requests[0].arrival, requests[-1].arrival
    stretch = shape.time_scale
    if shape.request_rate and len(requests) > 1:
        if last <= first:
            raise UsageError(
                f"trace {trace.name}: a rate of {shape.request_rate:g} a second cannot be given to {len(requests)} "
                "requests of one and the same time; take more of them, or no rate"
            )
        stretch = (len(requests) - 1) / shape.request_rate / (last - first)
    out: list[TraceRequest] = []
    clipped = 0
    for r in requests:
        prompt, output = _scaled(r.prompt_tokens, shape.length_scale), _scaled(r.output_tokens, shape.length_scale)
        short_prompt = min(prompt, shape.max_prompt or prompt)
        short_output = min(output, shape.max_output or output)
        clipped += (short_prompt, short_output) != (prompt, output)
        arrival = (r.arrival - first) * stretch
        text = None if r.text is None else _cut(r.text, short_prompt / r.prompt_tokens)
        out.append(replace(r, arrival=arrival, prompt_tokens=short_prompt, output_tokens=short_output, text=text))
    block = _scaled(trace.prefix_block_tokens, shape.length_scale) if trace.prefix_block_tokens else 0
    return replace(trace, requests=tuple(out), prefix_block_tokens=block, clipped=trace.clipped + clipped)


def _scaled(tokens: int, scale: float) -> int:
    return tokens if scale == 1.0 else max(1, round(tokens * scale))


def _cut(text: str, share: float) -> str:
    """So much of a text, from its beginning; said again where more is wanted."""
    wanted = max(1, round(len(text) * share))
    return (text * -(-wanted // len(text)))[:wanted]
