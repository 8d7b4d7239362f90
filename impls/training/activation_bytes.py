"""What a training step of the decoder keeps for backward, and what making some of it again costs: by count.

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1, equation 1,
counts sbh (34 + 5as/h) bytes a layer: of a GPT layer in 16 bits with dropout masks and all scores of attention. The
same count for this decoder, in e bytes a number and w (at least 4) where it computes in wide, a token and layer:

    two norms       2 ((w + 2e) D + w)      wide input, normalized input, the output that products read; the root
    attention       e (2Q + 2G) + lH        rotated queries, keys, values, output; one log-sum-exp a head
    feed-forward    4eF                     gate, silu(gate), up, and their product that the last product reads

for D the model's width, Q and G the widths of all queries and of all keys, H heads, F the feed-forward's width, and l
bytes of a log-sum-exp. In 16 bits 16D + 4Q + 4G + 8F + 4H + 8. There are no masks (no dropout) and no scores: the
term 5as/h, which is what the paper's selective recomputation takes away, a flash kernel never stores. Norms weigh
more than the paper's 2 bytes each since they compute in float32, operation by operation; grouping makes keys small; the
gate makes the feed-forward four tensors of F.

A layer that is computed again keeps its input, eD; with products kept also

    e (Q + 2G) + eQ + lH + eD + 2eF         projections, attention and its log-sum-exp, output projection, gate, up

That is what :mod:`impls.training.lean_layer` keeps, its queries and keys rotated, the sum in place of the output
projection; with kernels also two roots of 4 bytes. When it makes gate and up again, 2eF less.

The angles (two of 4E a token) are shared by all layers, and the last norm, whose output is the hidden state, is kept.
"""

# Shapes: T tokens, S positions, L layers, C tokens of a chunk of the head, V vocabulary, E width of a head.

from __future__ import annotations

from dataclasses import dataclass

from harness.workload import Workload
from impls.fusion._count import COPY, ITEMSIZE, PRODUCTS

#: Bytes a second over an H200's host link, each way, as seen.
HOST_LINK = 55e9
LEAN = ("optimized", "gate_up_again")
WAYS = ("baseline", *LEAN, "selective_eager", "full", "every_other", "offload")


@dataclass(frozen=True)
class Counts:
    """All counts of one workload; bytes unless a name says otherwise. ``way`` is the name of a variant.

    fused: the passes of the lean ways are Triton's kernels.
    """

    layers: int
    tokens: int
    seq: int
    width: int
    ffn: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    vocab: int
    chunk: int
    size: int
    wide: int
    fused: bool = False

    @property
    def norm(self) -> int:
        """A norm, a token."""
        return (self.wide + 2 * self.size) * self.width + self.wide

    @property
    def log_sum_exp(self) -> int:
        """Of attention, a token."""
        return self.wide * self.heads

    @property
    def layer(self) -> int:
        """A layer that keeps everything, a token."""
        return 2 * self.norm + self.size * (2 * self.queries + 2 * self.keys + 4 * self.ffn) + self.log_sum_exp

    def layer_of(self, way: str) -> float:
        """A layer, a token, on average."""
        entry = self.size * self.width
        products = self.size * (2 * self.queries + 2 * self.keys + self.width + 2 * self.ffn) + self.log_sum_exp
        again = (self.layers + 1) // 2
        mixed = (again * entry + (self.layers - again) * self.layer) / self.layers
        kept = {"baseline": self.layer, "full": entry, "every_other": mixed, "offload": 0}
        lean = entry + products + 2 * self.root
        kept |= {"optimized": lean, "gate_up_again": lean - 2 * self.size * self.ffn}
        return float({**kept, "selective_eager": entry + products}[way])

    @property
    def root(self) -> int:
        """What a lean layer keeps of a norm beside its input, a token."""
        return 4 if self.fused else 0

    def saved(self, way: str) -> float:
        """What lies on the device when forward is done."""
        hidden, angles = self.size * self.width, 2 * 4 * self.head_dim
        if way == "offload":
            return float(self.tokens * hidden)
        if way in LEAN:
            tables = self.seq * angles // 2 if self.fused else self.tokens * angles
            return self.tokens * (self.layers * self.layer_of(way) + 2 * hidden + self.root) + tables
        return self.tokens * (self.layers * self.layer_of(way) + self.norm + angles)

    def again(self, way: str) -> float:
        """A token, what backward of the last layer has more than before it when it has computed the layer again."""
        shared = self.size * self.width if self.size == self.wide else 0  # then the wide input is the layer's own
        full = self.layer - shared
        products = 2 * self.norm - shared + 2 * self.size * self.ffn - self.size * self.width
        last = full if self.layers % 2 else 0
        return float({"full": full, "selective_eager": products, "every_other": last}.get(way, 0))

    def peak(self, way: str) -> float:
        """The most that is alive in a step above weights and gradients: in the head, where three tensors of a chunk's
        logits are alive in wide; in the last norm's backward; or in the last layer's, at its feed-forward, where its
        last product's two gradients or the gate's three are alive, or at the norm before that.

        Offloaded, an operation has back what it needs when it needs it: a norm its wide input, a product its input and
        its weight, the gate its two factors. Attention is left out: it has less, for a feed-forward wider than the
        model.
        """
        c, e, w = self, self.size, self.wide
        logits = c.chunk * c.vocab
        targets = 8 * c.tokens if c.tokens > c.seq else 0  # of one row they are a view
        head = targets + max(3 * w * logits, e * (logits + (c.vocab + c.chunk) * c.width))
        gradient = e * c.width * c.tokens
        if way in LEAN:
            return max(c.saved(way) + head + gradient, c.at_last_feed_forward(way))
        in_norm = c.tokens * (5 * w * c.width - w)  # its input's gradient stands where its normalized input was
        at_layer = c.again(way) * c.tokens - c.norm * c.tokens + 3 * gradient
        feed_forward = at_layer + e * c.ffn * max(2 * c.tokens, c.width + c.tokens)
        norm = max(in_norm, at_layer + in_norm - 2 * gradient - 4 * e * c.ffn * c.tokens)
        if way == "offload":
            norm = 6 * w * c.width * c.tokens + 2 * gradient  # of a layer, beside the residual stream's gradient
            weights = 2 * e * c.ffn * (c.width + c.tokens) + 2 * gradient
            feed_forward = 2 * gradient + max(5 * e * c.ffn * c.tokens, weights)
        return c.saved(way) + max(head + gradient, norm, feed_forward)

    def at_last_feed_forward(self, way: str) -> float:
        """The most that is alive in a lean step's backward, which is at the last layer's feed-forward.

        With kernels at the gate, where the product that is made again takes the place of its gradient and lies beside
        the last weight's, or where the three weights' gradients do beside the norm's output and its gradient; a norm's
        programs' parts of its weight's gradient are left out. With torch's operations at the gate, where the product,
        its gradient and those of gate, of silu(gate) and of up are alive; at the three weights' gradients too, beside
        those of gate and up; or at the norm, six wide tensors. What is made again of gate and up is alive besides.
        """
        e, w = self.size, self.wide
        stream, inner, weight = e * self.tokens * self.width, e * self.tokens * self.ffn, e * self.ffn * self.width
        before = self.saved(way) + stream - self.tokens * self.root
        again = 2 * inner if way == "gate_up_again" else 0
        at_gate = (again + stream if again else 0) + (inner + weight if self.fused else 5 * inner)
        if self.fused:
            return before + max(at_gate, again + 3 * weight + 2 * stream)
        narrow = stream if e < w else 0
        norm = 3 * weight + stream + 6 * w * self.tokens * self.width + narrow + e * self.width
        return before + max(at_gate, 2 * inner + 3 * weight + 2 * stream, norm)

    def to_host(self) -> float:
        """Bytes that torch's save_on_cpu sends to the host in a forward, and as many back.

        It sends what each operation saves, so a tensor as often as operations save it: a wide norm input and the root
        twice, a norm's output once for each product that reads it, the angles four times a layer, and the weights.
        """
        c, e, w = self, self.size, self.wide
        norm = (2 * w + e) * c.width + 2 * w
        attention = 3 * e * c.width + 4 * 4 * c.head_dim + e * (3 * c.queries + 2 * c.keys) + c.log_sum_exp
        feed_forward = 2 * e * c.width + 4 * e * c.ffn
        weights = 2 * c.width + c.layer_weights
        each = c.tokens * (2 * norm + attention + feed_forward) + e * weights
        last = c.tokens * norm + e * c.width
        return float(c.layers * each + last + c.tokens * 8)  # and the tokens' ids

    @property
    def layer_weights(self) -> int:
        """Weights of a layer's products."""
        return self.width * (2 * self.queries + 2 * self.keys + 3 * self.ffn)

    def recomputed_flops(self, way: str) -> float:
        """Operations beyond the model's own: of a layer all products but the last one, whose output no gradient needs,
        and causal attention. Chen et al. 2016 count a whole forward: 4/3 of a step."""
        again = {"full": self.layers, "every_other": (self.layers + 1) // 2}.get(way, 0)
        products = 2 * (self.layer_weights - self.width * self.ffn)
        if way == "gate_up_again":
            return float(4 * self.layers * self.tokens * self.width * self.ffn)
        return float(again * self.tokens * (products + 2 * self.seq * self.queries))

    @property
    def flops(self) -> float:
        """Of the model: six for each weight of a product and token, causal attention forward and twice backward."""
        head = self.width * self.vocab
        a_token = self.layers * (6 * self.layer_weights + 6 * self.seq * self.queries) + 6 * head
        return float(self.tokens * a_token)

    def passes(self, again: bool) -> float:
        """Bytes that the operations of a layer's forward other than products and attention move, a token.

        again: when the layer is computed anew, where the first norm has nothing to add.
        """
        return self.stream_passes(again) + self.inner_passes

    def stream_passes(self, again: bool) -> float:
        """Those of the residual stream: two norms, and the sums before them."""
        e, w = self.size, self.wide
        norm = (2 * self._cast + 5 * w + 2 * e) * self.width
        return float(2 * norm + 3 * e * self.width * (1 if again else 2))

    @property
    def inner_passes(self) -> float:
        """Those between the products: rotation and the gate."""
        e, w = self.size, self.wide
        turn = (2 * (e + w) + 3 * e + 3 * w + self._cast) * (self.queries + self.keys)
        return float(turn + 5 * e * self.ffn)

    @property
    def lean_passes(self) -> float:
        """Those of a lean layer with kernels, forward and backward, a token (:mod:`impls.training.lean_passes`)."""
        norm = (4 + 4 + 2) * self.width
        return float(self.size * (2 * norm + 4 * (self.queries + self.keys) + (3 + 6) * self.ffn))

    @property
    def _cast(self) -> int:
        """Of a number to wide or back."""
        return self.size + self.wide if self.size < self.wide else 0

    def seconds(self, way: str) -> float:
        """Predicted on an H200: products and attention at its rate of products, passes at that of a copy, with
        backward's passes counted as twice forward's; offloading waits for the host link both ways."""
        e, w = self.size, self.wide
        head = self.tokens * self.vocab * (2 * e + 8 * w)
        weights = self.layers * self.layer_weights + 2 * self.vocab * self.width
        gradients = 4 * e * weights  # set to zero, then read and written beside what is added
        layer = self.lean_passes if way in LEAN else 3 * self.passes(False)
        moved = self.layers * self.tokens * layer + head + gradients
        again = {"full": self.layers, "selective_eager": self.layers, "every_other": (self.layers + 1) // 2}.get(way, 0)
        moved += again * self.tokens * self.passes(True)
        link = 2 * self.to_host() / HOST_LINK if way == "offload" else 0.0
        return (self.flops + self.recomputed_flops(way)) / PRODUCTS + moved / COPY + link

    def time_factor(self, way: str) -> float:
        """Predicted time over the baseline's."""
        return self.seconds(way) / self.seconds("baseline")


def counts_of(workload: Workload, fused: bool = False) -> Counts:
    """The counts of a workload with ``layers``, ``width``, ``ffn``, ``heads``, ``kv_heads``, ``vocab``, ``batch``,
    ``seq`` and ``chunk``."""
    head_dim = workload.width // workload.heads
    size = ITEMSIZE[workload.dtype]
    tokens = workload.batch * workload.seq
    return Counts(
        layers=workload.layers,
        tokens=tokens,
        seq=workload.seq,
        width=workload.width,
        ffn=workload.ffn,
        heads=workload.heads,
        queries=workload.heads * head_dim,
        keys=workload.kv_heads * head_dim,
        head_dim=head_dim,
        vocab=workload.vocab,
        chunk=min(workload.chunk, tokens),
        size=size,
        wide=max(4, size),
        fused=fused,
    )
