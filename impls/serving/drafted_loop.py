"""The decode loop with and without drafts: text and lengths on the device, a pass, what it emits, the next draft.

Rolling back costs nothing: a rejected draft's keys and values lie behind its row's length, where no position looks
before a later pass has overwritten them. Rows of a batch go their own ways, each at its own length; one that is done
runs along until the last is.

On a GPU a pass and a draft are CUDA graphs, and the host reads two flags a step: whether any row goes on, and whether
any has a draft (without one a step runs one position). The loop without drafts reads nothing.

Shape suffixes: B rows, C text places, S positions of a pass, k drafted tokens, V vocabulary.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from impls.model.cache import KVCache
from impls.model.decoder import Attend, Decoder, keep_unrotated, rotate
from impls.serving.draft_acceptance import Draft, Greedy, Rule, expected_speedup
from impls.serving.drafts import Drafter

#: Cache places are a multiple of this, as the attention kernels like their masks.
ALIGN = 16
#: A part's price is the median of so many timings, of so many calls each.
REPEATS, CALLS = 7, 2
TALLY = ("row_steps", "drafted_steps", "accepted_tokens", "examined_drafts", "emitted_tokens", "idle_row_steps")


class Rotated:
    """An ``Attend`` for a decoder that leaves the rotation to it (:func:`impls.serving.fast_decoder.fast_decoder`)."""

    def __init__(self, inner: Attend, cos_BSE: Tensor, sin_BSE: Tensor) -> None:
        self.inner, self.cos_BSE, self.sin_BSE = inner, cos_BSE, sin_BSE

    def __call__(self, layer: int, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        """Rotates, then attends."""
        return self.inner(layer, *rotate(q_BSHE, k_BSKE, self.cos_BSE, self.sin_BSE), v_BSKE)


class DraftedLoop:
    """Decodes N tokens behind each row of a prompt (B, P).

    :meth:`prefill` takes a prompt, :meth:`run` decodes behind it and may be called again. The ``drafter`` is set
    before the first run; None decodes one token a step.
    """

    def __init__(self, model: Decoder, rows: int, prompt: int, new: int, drafted: int, rule: Rule) -> None:
        weight = model.embed_tokens.weight
        device = weight.device
        self.model, self.rule = model, rule
        self.rows, self.prompt, self.new, self.drafted = rows, prompt, new, drafted
        self.drafter: Drafter | None = None
        self.unrotated = cast(Any, model.layers[0]).self_attn.rotate is keep_unrotated
        self.limit = prompt + new
        # A row that is done still runs k positions past its end, and writes as many tokens.
        self.places = -(-(self.limit + drafted + 1) // ALIGN) * ALIGN
        self.cache = KVCache(model.config, rows, self.places, weight.dtype, device)
        self.text_BC = torch.zeros(rows, self.places, dtype=torch.long, device=device)
        self.length_B = torch.full((rows,), prompt, device=device)
        self.draft: Draft | None = None
        self.tally = torch.zeros(len(TALLY), dtype=torch.long, device=device)
        self.flags = torch.zeros(2, dtype=torch.bool, device=device)
        self.calls: dict[str, Callable[[], None]] = {}
        self.steps = self.checked = 0

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def attend(self, positions_BS: Tensor) -> Attend:
        """Attention of new positions over the cache; the context is fixed, as a captured graph needs it."""
        return self._rotating(self.cache.extend(positions_BS, context=self.places), positions_BS)

    def _rotating(self, attend: Attend, positions_BS: Tensor) -> Attend:
        return Rotated(attend, *self.model.cos_sin(positions_BS)) if self.unrotated else attend

    def propose(self) -> None:
        """The next draft, into the same memory each time."""
        assert self.drafter is not None
        draft = self.drafter(self.text_BC, self.length_B)
        if self.draft is None:
            self.draft = draft
        self.draft.tokens_Bk.copy_(draft.tokens_Bk)
        self.draft.found_B.copy_(draft.found_B)
        if self.draft.chances_BkV is not None and draft.chances_BkV is not None:
            self.draft.chances_BkV.copy_(draft.chances_BkV)
        self.flags[1] = (draft.found_B & (self.length_B < self.limit)).any()

    def verify(self) -> None:
        """One pass over the last token and the draft, and what it emits."""
        self._pass(self.draft)

    def extend(self) -> None:
        """One pass over the last token."""
        self._pass(None)

    def _pass(self, draft: Draft | None) -> None:
        length_B1 = self.length_B.unsqueeze(1)
        tokens_BS = self.text_BC.gather(1, length_B1 - 1)
        if draft is not None:
            tokens_BS = torch.cat((tokens_BS, draft.tokens_Bk), dim=1)
        ahead_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        positions_BS = length_B1 - 1 + ahead_S
        logits_BSV = self.model(tokens_BS, positions_BS, self.attend(positions_BS))
        accepted_B, emitted_BS = self.rule(logits_BSV, draft)
        # What lies behind the accepted ones is no text yet: the next pass writes over it.
        self.text_BC.scatter_(1, length_B1 + ahead_S, emitted_BS)
        after_B = self.accept(self.length_B, accepted_B)
        self._count(draft, accepted_B, after_B)
        self.length_B.copy_(after_B)
        self.flags[0] = (after_B < self.limit).any()

    def accept(self, length_B: Tensor, accepted_B: Tensor) -> Tensor:
        """Lengths after a pass: the accepted drafts and one token more, up to the limit."""
        return (length_B + accepted_B + 1).clamp(max=self.limit)

    def _count(self, draft: Draft | None, accepted_B: Tensor, after_B: Tensor) -> None:
        active_B = self.length_B < self.limit
        drafted_B = active_B & draft.found_B if draft is not None else torch.zeros_like(active_B)
        # A rejected draft was examined, those behind it were not; what lies past the limit is nobody's text.
        room_B = (self.limit - self.length_B).clamp(max=self.drafted) * drafted_B
        examined_B = (accepted_B + 1).minimum(room_B)
        accepted_B = accepted_B.minimum(room_B)
        each = (active_B, drafted_B, accepted_B, examined_B, after_B - self.length_B, ~active_B)
        self.tally += torch.stack([x.sum() for x in each])

    # -- the loop ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, prompt_BP: Tensor) -> None:
        """Takes the prompt; keys and values of all but its last token, which the first step runs."""
        self.text_BC.zero_()
        self.text_BC[:, : self.prompt] = prompt_BP
        if self.prompt > 1:
            positions_BS = torch.arange(self.prompt - 1, device=prompt_BP.device).expand(prompt_BP.shape[0], -1)
            attend = self._rotating(self.cache.prefill(positions_BS), positions_BS)
            self.model.hidden(prompt_BP[:, :-1], positions_BS, attend)

    def restart(self) -> None:
        """Back to the end of the prompt."""
        self.length_B.fill_(self.prompt)
        self.tally.zero_()
        self.steps = self.checked = 0

    @torch.inference_mode()
    def run(self) -> None:
        """N tokens a row."""
        self._prepare()
        self.restart()
        if self.drafter is None:
            for _ in range(self.new):
                self.calls["extend"]()
            self.steps = self.new
            return
        self.flags[0] = True
        self.calls["propose"]()
        while True:
            more, found = self.flags.tolist()
            if not more:
                return
            self.calls["verify" if found else "extend"]()
            self.calls["propose"]()
            self.steps += 1
            self.checked += found

    def answer(self) -> Tensor:
        """The decoded tokens, (B, N)."""
        return self.text_BC[:, self.prompt : self.limit]

    @torch.inference_mode()
    def _prepare(self) -> None:
        if self.calls:
            return
        parts = [self.extend] if self.drafter is None else [self.propose, self.verify, self.extend]
        captured = self.text_BC.is_cuda and isinstance(self.rule, Greedy)
        for part in parts:
            self.calls[part.__name__] = capture(part) if captured else part

    # -- what it was worth -------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, float]:
        """What the last run counted, per-token time of one more, the price of each part, and what theory makes of both.

        ``acceptance_rate`` is accepted drafts over examined ones (those behind a rejected draft were not), which is the
        theory's a; ``draft_cost`` and ``verify_cost`` are in passes over one position.
        """
        counts = dict(zip(TALLY, map(float, self.tally.tolist()), strict=True))
        counts["passes"] = float(self.steps)
        counts["token_latency_s"] = self._seconds(self.run) / self.new
        if self.drafter is None:
            return counts
        rows, k = max(1.0, counts["row_steps"]), self.drafted
        checked = self.checked / max(1, self.steps)
        rate = counts["accepted_tokens"] / max(1.0, counts["examined_drafts"])
        share = counts["drafted_steps"] / rows
        prices = self._prices()
        draft, verify = prices["propose"] / k / prices["extend"], prices["verify"] / prices["extend"]
        return {
            **counts,
            "acceptance_length": counts["emitted_tokens"] / rows,
            "acceptance_rate": rate,
            "drafted_share": share,
            "checked_share": checked,
            "extend_s": prices["extend"],
            "verify_s": prices["verify"],
            "propose_s": prices["propose"],
            "draft_cost": draft,
            "verify_cost": verify,
            "theory_speedup": expected_speedup(rate, k, draft, 1.0, share),
            "predicted_speedup": expected_speedup(rate, k, draft, verify, share, checked),
        }

    @torch.inference_mode()
    def _prices(self) -> dict[str, float]:
        """Seconds of each part in the middle of the answer, taken in turns so that a disturbance falls on all.

        Text, lengths and tally are afterwards as they were.
        """
        kept = [(x, x.clone()) for x in (self.text_BC, self.length_B, self.tally, self.flags)]
        taken: dict[str, list[float]] = {name: [] for name in self.calls}
        for _ in range(REPEATS):
            for name, call in self.calls.items():
                self.length_B.fill_(self.prompt + self.new // 2)
                taken[name].append(self._seconds(call, CALLS))
        for x, before in kept:
            x.copy_(before)
        return {name: statistics.median(seconds) for name, seconds in taken.items()}

    def _seconds(self, call: Callable[[], None], calls: int = 1) -> float:
        self._fence()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        self._fence()
        return (time.perf_counter() - started) / calls

    def _fence(self) -> None:
        if self.text_BC.is_cuda:
            torch.cuda.synchronize()


def capture(part: Callable[[], None]) -> Callable[[], None]:
    """A part of a step as a CUDA graph; the libraries' own set-up runs before and is not captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            part()
    torch.cuda.current_stream().wait_stream(stream)
    # What a collection frees in the middle of a capture can spoil it.
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        part()
    replay: Callable[[], None] = graph.replay
    return replay
