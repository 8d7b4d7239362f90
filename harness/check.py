"""Judges a result against the oracle, by the rule that the pair states (design: "Being right")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.pair import Tolerance

#: Unit of rounding by dtype: what one rounding of the largest element costs.
UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
#: How far a baseline may be from the oracle: it sets the bound of the others, so it must be sane itself.
BASELINE_SLACK = 64.0
#: Roundings allowed where the baseline did not fit, so that its own error is not known.
WITHOUT_BASELINE = 4.0
#: Sums are accumulated in float32 at least.
ACCUMULATED = 2.0**-24
#: Terms that a kernel may add one after another before it has to add in blocks: 2 ** 14 cost 2 ** -17 of the sum.
IN_A_ROW = 1 << 14
#: How far the worst of a few hundred sums may be beyond what is allowed in root mean square.
OF_THE_LARGEST = 3.0
#: In 16 bits a gradient's own rounding grows over layers and steps: 4 % was seen in bfloat16 after five steps of twelve
#: layers that agree to 2e-6 in float32. A collective that is missing or doubled moves a gradient by half its size.
RANKS_BOUND = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 2.0**-4, "float16": 2.0**-7}
CHUNK = 1 << 25


@dataclass
class Verdict:
    """The outcome of a check. ``error`` and ``bound`` are the worst tensor's; ``tensors`` holds them all."""

    rule: str
    passed: bool = True
    reason: str = ""
    tensor: str = ""
    error: float = 0.0
    bound: float = 0.0
    tensors: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """The record's ``check`` object."""
        return {
            "rule": self.rule,
            "passed": self.passed,
            "tensor": self.tensor,
            "error": _finite(self.error),
            "bound": _finite(self.bound),
            "tensors": {n: {k: _finite(v) for k, v in t.items()} for n, t in self.tensors.items()},
        }

    def fail(self, reason: str) -> Verdict:
        """Marks the check as failed; the first reason stays."""
        if self.passed:
            self.passed, self.reason = False, reason
        return self


@dataclass(frozen=True)
class Errors:
    """Distance of a tensor from the oracle: root mean square and largest element, and the oracle's own size."""

    rms: float
    largest: float
    oracle_rms: float
    oracle_max: float


def judge(
    tolerance: Tolerance,
    dtype: str,
    oracle: Mapping[str, Any],
    result: Mapping[str, Any],
    baseline: Mapping[str, Any] | None,
    is_baseline: bool = False,
    gathered: int = 0,
) -> Verdict:
    """Judges a result by the pair's rule.

    oracle: the trusted result by name. result: the variant's. baseline: the baseline's own result on the same
    inputs, None when there is none (it did not fit), which leaves a bound of a few roundings. is_baseline: the result
    is the baseline's, whose own error sets the others' bound, so that it is held to a wide bound of its own.
    gathered: elements of the largest input: a result of fewer elements sums over them (see :func:`sum_floor`).
    """
    verdict = Verdict(tolerance.rule)
    if tolerance.rule == "tokens":
        return _judge_tokens(verdict, oracle, result)
    missing, extra = sorted(set(oracle) - set(result)), sorted(set(result) - set(oracle))
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra)} too many"] * bool(extra)
        return verdict.fail("the result " + " and ".join(parts))
    largest = max([gathered, *(t.numel() for t in oracle.values() if isinstance(t, torch.Tensor))])
    for name, truth in oracle.items():
        other = None if baseline is None else baseline.get(name)
        _judge_tensor(verdict, tolerance, dtype, name, truth, result[name], other, is_baseline, largest)
    return verdict


def _judge_tensor(
    verdict: Verdict,
    tolerance: Tolerance,
    dtype: str,
    name: str,
    truth: torch.Tensor,
    got: torch.Tensor,
    baseline: torch.Tensor | None,
    is_baseline: bool,
    largest: int,
) -> None:
    form = _form_problem(name, truth, got, baseline)
    if form is not None:
        verdict.fail(form)
        return
    if tolerance.rule == "exact":
        same = torch.equal(got.to(device=truth.device, dtype=truth.dtype), truth)
        verdict.tensors[name] = {"error": 0.0 if same else 1.0, "bound": 0.0}
        if not same:
            verdict.tensor, verdict.error = name, 1.0
            verdict.fail(f"{name} differs from the oracle; it must be equal to the bit")
        return
    place = _not_finite_place(truth, got)
    if place is not None:
        verdict.tensor = name
        verdict.fail(f"{name} is {place[1]} at {place[0]} where the oracle is {place[2]}")
        return
    errors = distance(truth, got)
    rms_bound, max_bound = _bounds(tolerance, dtype, truth, errors, baseline, is_baseline, largest)
    entry = {"error": errors.rms, "bound": rms_bound, "error_max": errors.largest, "bound_max": max_bound}
    verdict.tensors[name] = entry
    shares = [(errors.rms, rms_bound, "root mean square"), (errors.largest, max_bound, "largest element")]
    for error, bound, what in shares:
        if (verdict.bound == 0 and verdict.error == 0) or _share(error, bound) > _share(verdict.error, verdict.bound):
            verdict.tensor, verdict.error, verdict.bound = name, error, bound
        if error > bound:
            verdict.fail(f"{name}: error {error:.3g} ({what}) over the bound {bound:.3g} of {tolerance.rule}")


def _bounds(
    tolerance: Tolerance,
    dtype: str,
    truth: torch.Tensor,
    errors: Errors,
    baseline: torch.Tensor | None,
    is_baseline: bool,
    largest: int,
) -> tuple[float, float]:
    if tolerance.rule == "lossy":
        if tolerance.bound is None:
            raise ValueError("Tolerance(rule='lossy') needs a bound")
        return tolerance.bound * errors.oracle_rms, math.inf
    if tolerance.rule == "ranks":
        relative = tolerance.bound or RANKS_BOUND.get(dtype, UNIT.get(dtype, 2.0**-8) * 4)
        return relative * errors.oracle_rms, math.inf
    one = UNIT.get(dtype, 2.0**-8) * errors.oracle_max
    least = sum_floor(errors.oracle_rms, truth.numel(), largest, dtype)
    if is_baseline or baseline is None:
        wide = (BASELINE_SLACK if is_baseline else WITHOUT_BASELINE) * one
        return max(wide, least), max(wide, OF_THE_LARGEST * least)
    own = distance(truth, baseline)
    return max(2 * own.rms, one, least), max(2 * own.largest, one, OF_THE_LARGEST * least)


def sum_floor(oracle_rms: float, elements: int, largest: int, dtype: str) -> float:
    """Error that a sound kernel may have in a tensor whose elements are sums over a larger one.

    One rounding of a sum of N = largest / elements terms added in float32 one after another costs u of what is summed
    so far; over the N of them the roots of the squares add up to 0.3 u sqrt(N) of a sum of typical size (Higham, "The
    Accuracy of Floating Point Summation", 1993, section 4, for random roundings). u sqrt(N) is three standard
    deviations of that. The plain way, which sums pairwise, is far below; it is no measure where there are few elements,
    each of which may be right by luck, nor of the typical size, which n elements give to one part in n.
    N is at most ``IN_A_ROW``, so that the floor stays within 2 ** -15 of the tensor whatever its size.
    """
    if elements == 0 or largest <= elements:
        return 0.0
    terms = min(largest / elements, IN_A_ROW)
    unit = min(ACCUMULATED, UNIT.get(dtype, ACCUMULATED))
    return unit * math.sqrt(terms) * oracle_rms * (1 + 3 / elements)


def distance(truth: torch.Tensor, got: torch.Tensor) -> Errors:
    """Errors over the elements where the oracle is finite, in float64, in pieces so that large tensors fit."""
    total = square = reference = 0.0
    largest = oracle_max = 0.0
    flat_truth, flat_got = truth.reshape(-1), got.reshape(-1)
    for start in range(0, flat_truth.numel(), CHUNK):
        a, b = _side_by_side(flat_truth, flat_got, start)
        a, b = a.double(), b.double()
        finite = a.isfinite() & b.isfinite()
        a, b = a[finite], b[finite]
        if not a.numel():
            continue
        delta = (a - b).abs()
        total += a.numel()
        square += float(delta.square().sum())
        reference += float(a.square().sum())
        largest = max(largest, float(delta.max()))
        oracle_max = max(oracle_max, float(a.abs().max()))
    count = max(total, 1.0)
    return Errors(math.sqrt(square / count), largest, math.sqrt(reference / count), oracle_max)


def _side_by_side(truth: torch.Tensor, got: torch.Tensor, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A piece of both on one device: the accelerator when either is there, since a large truth waits on the host."""
    device = got.device if truth.device.type == "cpu" else truth.device
    end = start + CHUNK
    return truth[start:end].to(device), got[start:end].to(device)


def _form_problem(name: str, truth: torch.Tensor, got: Any, baseline: torch.Tensor | None) -> str | None:
    if not isinstance(got, torch.Tensor):
        return f"{name} is {type(got).__name__}, not a tensor"
    if got.shape != truth.shape:
        return f"{name} has shape {tuple(got.shape)}, the oracle {tuple(truth.shape)}"
    if baseline is not None:
        if got.dtype != baseline.dtype:
            return f"{name} has dtype {got.dtype}, the baseline {baseline.dtype}"
        if not name.startswith("grad:") and _strides(got) != _strides(baseline):
            return f"{name} has strides {got.stride()}, the baseline {baseline.stride()}"
    return None


def _strides(tensor: torch.Tensor) -> list[int]:
    return [s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]


def _not_finite_place(truth: torch.Tensor, got: torch.Tensor) -> tuple[list[int], str, str] | None:
    """Where the result is NaN or inf and the oracle is not, or the other way round; None when they agree."""
    flat_truth, flat_got = truth.reshape(-1), got.reshape(-1)
    for start in range(0, flat_truth.numel(), CHUNK):
        a, b = _side_by_side(flat_truth, flat_got, start)
        bad = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf()) | (a.isinf() & b.isinf() & (a.sign() != b.sign()))
        if bool(bad.any()):
            at = start + int(bad.to(torch.int8).argmax())
            index = [int(i) for i in torch.unravel_index(torch.tensor(at), truth.shape)]
            return index, f"{float(flat_got[at])}", f"{float(flat_truth[at]):.6g}"
    return None


def _judge_tokens(verdict: Verdict, oracle: Mapping[str, Any], result: Mapping[str, Any]) -> Verdict:
    missing = sorted(set(oracle) - set(result))
    if missing:
        return verdict.fail(f"no tokens for {', '.join(missing[:5])}{' …' if len(missing) > 5 else ''}")
    wrong = 0
    for name, truth in oracle.items():
        want, have = _token_list(truth), _token_list(result[name])
        if want != have:
            wrong += 1
            at = next(
                (i for i, (a, b) in enumerate(zip(want, have, strict=False)) if a != b), min(len(want), len(have))
            )
            verdict.tensor = verdict.tensor or name
            verdict.fail(f"request {name}: token {at} differs from the plain loop ({len(have)} of {len(want)} tokens)")
    verdict.error, verdict.bound = wrong / max(len(oracle), 1), 0.0
    return verdict


def judge_scored(score: Mapping[str, float]) -> Verdict:
    """The serving rule in lower precision, from the oracle's own scoring of the tokens that were emitted.

    score: ``gap`` and ``bound`` of the worst token (its logit's distance from the best, and twice the plain
    low-precision loop's largest logit error there), ``over`` (tokens whose gap is over their bound), ``divergences``.
    """
    verdict = Verdict("tokens", error=score["gap"], bound=score["bound"], tensor="logits")
    verdict.tensors["logits"] = {k: float(v) for k, v in score.items()}
    if score["over"] > 0 or not math.isfinite(score["gap"]):
        verdict.fail(f"{score['over']:.0f} tokens lie further from the best logit than rounding explains")
    return verdict


def _token_list(tokens: Any) -> list[int]:
    values = tokens.reshape(-1).tolist() if isinstance(tokens, torch.Tensor) else list(tokens)
    return [int(v) for v in values]


def _share(error: float, bound: float) -> float:
    if error == 0:
        return 0.0
    return error / bound if bound > 0 else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
