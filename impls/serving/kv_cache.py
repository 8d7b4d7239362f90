"""Key-value cache: decode that recomputes the whole prefix for each token, against decode that remembers it.

A prompt of P tokens and N new ones. The plain way runs the model over P, P+1, … P+N-1 tokens; with keys and values
kept (Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 2) it runs over P once and then over one
token at a time.

    FLOPs   plain   2·W·Σ(P+i)  = 2·W·N·(P + (N-1)/2), W the weights that multiply a token
            cached  2·W·(P + N - 1)
    bytes   both read the weights N times; the cached way also reads the cache, far less while contexts are short

On a machine where arithmetic binds (a CPU, or long prompts) the speedup tends to the ratio of FLOPs,
N·(P+(N-1)/2) / (P+N-1); where reading the weights binds (a GPU at batch 1, short prompts) it tends to one. What is
paid: memory, 2·layers·KV heads·head width values a token.

Tokens are chosen greedily, and must be the very tokens of the plain loop in float32.
"""

# Shapes: B rows, P prompt, N new tokens.

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.pair import Claim, Context, Inputs, Pair, Tolerance, Variant, Work
from harness.workload import Workload
from impls.model.cache import KVCache
from impls.model.decoder import Decoder
from impls.model.resolve import config_for, head_flops, model_for, not_here, prompts_for, token_flops
from impls.serving.engine import Engine, Output
from impls.serving.request import Request, Sampling
from impls.serving.runner import ModelRunner
from impls.serving.scheduler import EngineConfig

#: Tokens of a cache block of the engine's.
BLOCK = 16
ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}


def inputs(workload: Workload, ctx: Context) -> Mapping[str, Any]:
    """The model, and prompts (B, P) of real text where the weights are real."""
    return {
        "model": model_for(workload, ctx),
        "prompt": prompts_for(workload, ctx, workload.batch, workload.prompt),
    }


class Recompute:
    """The plain way: every step runs the model over everything so far."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        self.new = int(workload.new)
        self.model: Decoder
        self.prompt: Tensor
        self.tokens: Tensor

    def load(self, inputs: Inputs) -> None:
        """Takes the weights as they are (they are only read) and a copy of the prompt."""
        self.model = inputs["model"]
        self.prompt = inputs["prompt"].clone()
        self.tokens = torch.full((self.prompt.shape[0], self.new), -1, device=self.prompt.device)

    @torch.inference_mode()
    def run(self) -> None:
        """Decodes N tokens."""
        so_far = self.prompt
        last = torch.empty(so_far.shape[0], dtype=torch.long, device=so_far.device)
        for step in range(self.new):
            logits = self.model(so_far, last_B=last.fill_(so_far.shape[1] - 1))
            token = logits.argmax(-1, keepdim=True)
            self.tokens[:, step : step + 1] = token
            so_far = torch.cat((so_far, token), dim=1)

    def result(self) -> dict[str, Tensor]:
        """The new tokens of each row."""
        return {f"row{i}": row for i, row in enumerate(self.tokens)}

    def poison(self) -> None:
        """No token is -1."""
        if hasattr(self, "tokens"):
            self.tokens.fill_(-1)

    def unload(self) -> None:
        """Nothing is held between runs but the tokens."""


class Cached(Recompute):
    """The fast way: keys and values stay, and a step runs the model over one token."""

    @torch.inference_mode()
    def run(self) -> None:
        """One pass over the prompt, then one token at a time."""
        model, prompt = self.model, self.prompt
        rows, length = prompt.shape
        weights = model.embed_tokens.weight
        cache = KVCache(model.config, rows, length + self.new, weights.dtype, weights.device)
        positions = torch.arange(length, device=prompt.device).expand(rows, length)
        last = torch.full((rows,), length - 1, device=prompt.device)
        token = model(prompt, positions, cache.prefill(positions), last_B=last).argmax(-1, keepdim=True)
        self.tokens[:, :1] = token
        for step in range(1, self.new):
            at = torch.full((rows, 1), length + step - 1, device=prompt.device)
            logits = model(token, at, cache.extend(at, context=length + step))
            token = logits[:, -1].argmax(-1, keepdim=True)
            self.tokens[:, step : step + 1] = token


class Oracle(Recompute):
    """The plain loop in float32, and the judge of tokens that were emitted in lower precision."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx)
        self.low: Decoder
        self.exact = model_for(workload, ctx, torch.float32)

    def load(self, inputs: Inputs) -> None:
        """Float32 weights in place of the workload's."""
        super().load(inputs)
        self.low, self.model = self.model, self.exact

    @torch.inference_mode()
    def score(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Each token by the float32 plain loop on the emitted prefix: its logit's distance from the best, against
        twice the low-precision plain loop's largest logit error there."""
        emitted = torch.stack([result[f"row{i}"] for i in range(len(result))])
        if bool((emitted < 0).any()):
            return {"gap": float("inf"), "bound": 0.0, "over": float((emitted < 0).sum()), "divergences": 0.0}
        whole = torch.cat((self.prompt, emitted), dim=1)[:, :-1]
        start = self.prompt.shape[1] - 1
        exact = self.exact(whole)[:, start:].float()
        error = (self.low(whole)[:, start:].float() - exact).abs().amax(-1)
        gap = exact.amax(-1) - exact.gather(-1, emitted.unsqueeze(-1)).squeeze(-1)
        bound = 2 * error
        worst = int((gap - bound).argmax())
        return {
            "gap": float(gap.reshape(-1)[worst]),
            "bound": float(bound.reshape(-1)[worst]),
            "over": float((gap > bound).sum()),
            "divergences": float((gap > 0).sum()),
        }


class Transformers(Recompute):
    """What a user of Hugging Face's library gets: ``generate`` with its own cache, on the same weights."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx)
        self.theirs: Any = None

    def load(self, inputs: Inputs) -> None:
        """Wraps the same weights in the library's model."""
        super().load(inputs)
        if self.theirs is None:
            self.theirs = as_transformers(self.model)

    @torch.inference_mode()
    def run(self) -> None:
        """One call of ``generate``, exactly N tokens."""
        out = self.theirs.generate(
            self.prompt,
            attention_mask=torch.ones_like(self.prompt),
            max_new_tokens=self.new,
            min_new_tokens=self.new,
            do_sample=False,
            pad_token_id=0,
        )
        self.tokens.copy_(out[:, self.prompt.shape[1] :])


class Served(Recompute):
    """The same rows as requests of the serving engine: paged cache, its kernels and its graphs where there is a GPU."""

    def __init__(self, workload: Workload, ctx: Context) -> None:
        super().__init__(workload, ctx)
        self.engine: Engine | None = None

    def load(self, inputs: Inputs) -> None:
        """Takes the prompts as requests that are all there at once; an engine is made for them the first time."""
        super().load(inputs)
        rows, length = self.prompt.shape
        if self.engine is None:
            blocks = -(-(length + self.new) // BLOCK)
            config = EngineConfig(
                max_running=rows,
                max_step_tokens=max(rows * length, rows),
                block_size=BLOCK,
                num_blocks=rows * blocks,
                context=length + self.new,
                lookahead=self.prompt.device.type == "cuda",
            )
            self.engine = Engine(ModelRunner(self.model, config), config)
        sampling = Sampling(max_tokens=self.new)
        self.requests = [Request(f"row{i}", row, sampling) for i, row in enumerate(self.prompt.tolist())]

    def run(self) -> None:
        """Serves all rows, exactly N tokens each."""
        assert self.engine is not None
        emitted: dict[str, list[int]] = {request.id: [] for request in self.requests}

        def keep(output: Output) -> None:
            if output.token is not None:
                emitted[output.id].append(output.token)

        self.engine.serve(self.requests, keep)
        self.tokens.copy_(torch.tensor([emitted[request.id] for request in self.requests]))

    def unload(self) -> None:
        """The engine stays: its graphs take long to capture."""

    def close(self) -> None:
        """Gives the cache and the graphs back."""
        self.engine = None


def as_transformers(model: Decoder) -> Any:
    """The same weights (shared, not copied) as a transformers LlamaForCausalLM in eval mode."""
    from transformers import LlamaConfig, LlamaForCausalLM

    c = model.config
    config = LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tie_word_embeddings,
        eos_token_id=None,
        bos_token_id=None,
    )
    weight = model.embed_tokens.weight
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    state = {k if k.startswith("lm_head") else f"model.{k}": v for k, v in model.state_dict().items()}
    state.setdefault("lm_head.weight", weight)
    theirs.load_state_dict(state, assign=True)
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config).to(weight.device)
    return theirs.eval()


def _plain_rope(workload: Workload) -> str | None:
    if workload.tier == "smoke":
        return "the library is not part of the smoke tier"
    return not_here(workload)


def work(workload: Workload) -> Work:
    """With the cache: every token multiplied once; the weights read once a step, the cache as it grows."""
    config, rows = config_for(workload), int(workload.batch)
    prompt, new, size = int(workload.prompt), int(workload.new), ITEMSIZE[workload.dtype]
    steps = prompt + new - 1
    flops = rows * (sum(token_flops(config, at + 1) for at in range(steps)) - (prompt - 1) * head_flops(config))
    weights = token_flops(config, 0) / 2
    kept = config.kv_values_per_token * rows * sum(prompt + i for i in range(1, new))
    return Work(
        flops=flops,
        bytes=(weights * new + kept) * size,
        launches=new,
        items=rows * new,
        unit="tokens",
        reasons={
            "flops": "two for each weight and token (the output head's from the prompt's last token on), attention "
            "over the positions seen (half of the square)",
            "bytes": "weights once for the prompt and once for each further token; keys and values seen by each",
        },
    )


def predict(workload: Workload) -> float:
    """The ratio of FLOPs, which is what an arithmetic-bound machine shows."""
    prompt, new = int(workload.prompt), int(workload.new)
    return new * (prompt + (new - 1) / 2) / (prompt + new - 1)


PAIR = Pair(
    name="kv_cache",
    kind="step",
    layer="system",
    relieves="compute",
    claim=Claim(latency="lower", throughput="higher", memory="higher", cost="cache memory grows with the context"),
    inputs=inputs,
    oracle=Oracle,
    variants={
        "baseline": Variant(Recompute, supports=not_here),
        "optimized": Variant(Cached, supports=not_here),
        "engine": Variant(Served, supports=not_here),
        "transformers": Variant(Transformers, peer="library", requires=("package:transformers",), supports=_plain_rope),
    },
    work=work,
    predict=predict,
    tolerance=Tolerance(rule="tokens"),
)
