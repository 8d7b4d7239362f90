"""What a run of an engine gave: the tokens of each request, and which requests were not served."""

from __future__ import annotations

from collections.abc import Sequence

from impls.serving.engine import Output
from impls.serving.request import Request


class Answers:
    """``tokens`` by request; ``lost``: requests that were refused or failed, with the reason."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.lost: dict[str, str] = {}

    def keep(self, output: Output) -> None:
        """Takes a token in, or the end of a request."""
        if output.token is not None:
            self.tokens.setdefault(output.id, []).append(output.token)
        if output.finished in ("refused", "failed"):
            self.lost[output.id] = f"{output.finished}: {output.reason}"

    def require_all(self, requests: Sequence[Request]) -> None:
        """Nothing when all were served.

        Raises:
            RuntimeError: some were not, so that this was another workload than the one asked for; the first is named.
        """
        if self.lost:
            name, reason = next(iter(self.lost.items()))
            raise RuntimeError(f"{len(self.lost)} of {len(requests)} requests were not served: {name} {reason}")

    def of(self, requests: Sequence[Request]) -> dict[str, list[int]]:
        """The tokens of each request, in their order; none for one that got nothing."""
        return {request.id: list(self.tokens.get(request.id, ())) for request in requests}
