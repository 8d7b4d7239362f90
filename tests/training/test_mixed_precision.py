"""Mixed precision: gradients within twice bfloat16's own error, loss curves like float32's, steps with inf left out."""

import itertools
import math

import pytest
import torch

from harness.check import judge
from harness.pair import Context, Inputs, Tolerance
from harness.workload import parse_workload
from impls.training import mixed_precision as mixed
from impls.training.bfloat16_adamw import BFloat16AdamW, round_stochastically
from impls.training.live_bytes import LiveBytes
from impls.training.mixed_precision import PAIR, STEPS, BFloat16, Float32, ScaledFloat16, inputs
from suites.training.mixed_precision import WORKLOADS

CPU = torch.device("cpu")
DIMS = {key: value for key, value in WORKLOADS[0].items() if key not in ("name", "tier", "dtype")}
NARROW = ("optimized", "float16", "stochastic", "kahan")


def case_of(build, dims=DIMS, seed=3):
    chosen = parse_workload(PAIR.name, {"name": "test", "tier": "smoke", "dtype": "float32", **dims}, "test")
    ctx = Context(CPU, torch.float32, seed)
    case = build(chosen, ctx)
    case.poison()
    case.load(Inputs(inputs(chosen, ctx), seed))
    return case


def outcome(build, dims=DIMS, seed=3):
    case = case_of(build, dims, seed)
    for _ in range(STEPS):
        case.run()
    return dict(case.result())


def variant(name):
    return PAIR.variant(name).fn


def nearest(workload, ctx):
    return BFloat16(workload, ctx, "nearest")


class NoUpdate(mixed.Autocast):
    def update(self):
        pass


def gradients(found):
    return {name: value for name, value in found.items() if name.startswith("grad.")}


@pytest.mark.parametrize("seed", [3, 4])
def test_gradients_are_within_twice_the_error_of_a_model_that_is_bfloat16_altogether(seed):
    truth, plain = (gradients(outcome(build, seed=seed)) for build in (PAIR.oracle, nearest))
    assert len(truth) == 21
    for name in ("optimized", "float16"):
        found = gradients(outcome(variant(name), seed=seed))
        verdict = judge(Tolerance(), "bfloat16", truth, found, plain)
        assert verdict.passed, verdict.reason
        # The bound is not so wide that float32 and bfloat16 cannot be told apart.
        exact = gradients(outcome(Float32, seed=seed))
        assert not judge(Tolerance(), "float32", truth, found, exact).passed


def test_the_plain_way_is_float32():
    truth, found = outcome(PAIR.oracle), outcome(Float32)
    assert list(truth) == list(found)
    verdict = judge(PAIR.tolerance, "float32", truth, found, None)
    assert verdict.passed
    assert max(t["error"] / max(t["bound"], 1e-30) for t in verdict.tensors.values()) < 1e-3
    assert truth["fall"][-1] > 0.5, "nothing is learned here: the fall would show no fault"


@pytest.mark.parametrize("name", NARROW)
def test_loss_curves_are_float32s_within_the_spread_of_its_seeds(name):
    counters = case_of(variant(name)).counters()
    assert 0 < counters["loss_gap"] < counters["loss_spread"]
    baseline = case_of(Float32).counters()
    assert baseline["loss_gap"] == 0
    assert baseline["loss_spread"] == counters["loss_spread"]


def test_a_loss_curve_without_updates_is_further_off_than_float32s_seeds():
    counters = case_of(NoUpdate).counters()
    assert counters["loss_gap"] > counters["loss_spread"]


class NotUnscaled(ScaledFloat16):
    """The scale stays in the gradients."""

    def gradients(self):
        return Float32.gradients(self)


class HalfTheLoss(mixed.Autocast):
    def differentiate(self, loss):
        (loss / 2).backward()


class OneUpdateDropped(mixed.Autocast):
    def update(self):
        if len(self.losses) != 2:
            super().update()


class WrongSign(mixed.Autocast):
    def update(self):
        for param in self.params.values():
            param.grad.neg_()
        super().update()


class TwiceTheStep(mixed.Autocast):
    def update(self):
        super().update()
        super().update()


class TwiceTheRate(mixed.Autocast):
    def restart(self):
        super().restart()
        self.optimizer.param_groups[0]["lr"] *= 2


class NoUpdateInFloat16(ScaledFloat16):
    def update(self):
        pass


class NeverFinite(ScaledFloat16):
    def differentiate(self, loss):
        super().differentiate(loss * math.nan)


UPDATES = [NoUpdate, OneUpdateDropped, WrongSign, TwiceTheStep, TwiceTheRate]
#: Wide enough that the rate of a narrow model is far too hot, narrow enough for two cores.
WIDER = {**DIMS, "layers": 1, "width": 512, "ffn": 1536, "heads": 8, "vocab": 1031, "batch": 1, "seq": 96}
SIZES = {"narrow": DIMS, "wide": WIDER}
WRONG = [(build, size) for build in UPDATES for size in SIZES]


@pytest.mark.parametrize(("build", "size"), [*WRONG, (NoUpdateInFloat16, "narrow"), (NeverFinite, "narrow")])
def test_a_wrong_update_shows_in_the_fall_of_the_loss(build, size):
    truth, found = (
        {name: value for name, value in outcome(made, SIZES[size]).items() if name in ("losses", "fall")}
        for made in (PAIR.oracle, build)
    )
    assert not judge(PAIR.tolerance, "float32", truth, found, None).passed


@pytest.mark.parametrize("dims", SIZES.values(), ids=SIZES)
def test_the_loss_falls_step_by_step_whatever_the_width_and_16_bits_follow_float32(dims):
    curves = {name: outcome(variant(name), dims)["losses"].double() for name in ("baseline", "optimized")}
    assert torch.all(curves["baseline"].diff() < 0)
    fall = curves["baseline"][0] - curves["baseline"][1:]
    assert fall[0] < curves["baseline"][0] / 4, "the first update is too hot: a narrow model's rate takes 0.8 of it"
    assert fall[-1] > 1
    assert float((curves["optimized"] - curves["baseline"]).norm() / fall.norm()) < 2**-4 / 4


def test_the_rate_falls_like_one_over_the_width():
    narrow, wide = mixed.adamw(64), mixed.adamw(2048)
    assert wide.pop("lr") * 32 == narrow.pop("lr") == 1e-3
    assert wide == narrow


def test_steps_left_out_are_made_up_for_before_losses_are_compared():
    class TooLarge(ScaledFloat16):
        init_scale = 2.0**30

    case = case_of(TooLarge)
    for _ in range(STEPS):
        case.run()
    assert case.losses[0] == case.losses[1], "no step was left out: the test shows nothing"
    verdict = judge(PAIR.tolerance, "float32", outcome(PAIR.oracle), outcome(TooLarge), outcome(Float32))
    assert all(verdict.tensors[name]["error"] <= verdict.tensors[name]["bound"] for name in ("losses", "fall"))
    assert case_of(TooLarge).counters()["loss_gap"] < 0.05


@pytest.mark.parametrize(("build", "where"), [(NoUpdate, "losses"), (NotUnscaled, "grad."), (HalfTheLoss, "grad.")])
def test_planted_faults_are_found(build, where):
    verdict = judge(PAIR.tolerance, "float32", outcome(PAIR.oracle), outcome(build), outcome(Float32))
    assert not verdict.passed
    assert where in verdict.reason


def state(case):
    params = [param.detach().clone() for param in case.params.values()]
    moments = [value.clone() for entry in case.optimizer.state.values() for value in entry.values()]
    return params + moments


def test_a_step_with_inf_gradients_changes_nothing_but_the_scale():
    case = case_of(ScaledFloat16)
    case.run()
    before = state(case)
    case.scaler.update(2.0**60)
    case.run()
    assert any(not param.grad.isfinite().all() for param in case.params.values())
    assert all(torch.equal(a, b) for a, b in zip(before, state(case), strict=True))
    assert case.scaler.get_scale() == 2.0**59
    case.scaler.update(2.0**10)
    case.run()
    assert not all(torch.equal(a, b) for a, b in zip(before, state(case), strict=True))


def test_the_scale_halves_until_gradients_are_finite_and_doubles_after_good_steps():
    class Eager(ScaledFloat16):
        init_scale, growth_interval = 2.0**40, 2

    case = case_of(Eager)
    scales, skipped = [case.scaler.get_scale()], []
    for _ in range(40):
        before = [param.detach().clone() for param in case.params.values()]
        case.run()
        still = all(torch.equal(a, b) for a, b in zip(before, case.params.values(), strict=True))
        skipped.append(still)
        scales.append(case.scaler.get_scale())
    ratios = [after / before for before, after in itertools.pairwise(scales)]
    assert set(ratios) == {0.5, 1.0, 2.0}
    assert [ratio == 0.5 for ratio in ratios] == skipped
    first = skipped.index(False)
    assert first > 0
    assert all(skipped[:first])
    assert ratios[first : first + 2] == [1.0, 2.0]
    assert len(case.losses) > 0
    assert case.losses[-1] < case.losses[0]


def test_small_gradients_vanish_in_float16_without_a_scale():
    def zeros(scale):
        class Scaled(ScaledFloat16):
            init_scale = scale

            def differentiate(self, loss):
                super().differentiate(loss * 1e-5)

        found = gradients(outcome(Scaled))
        return sum(float((value == 0).double().mean()) for value in found.values()) / len(found)

    assert zeros(1.0) > 0.5
    assert zeros(2.0**16) < zeros(1.0) / 2


def test_stochastic_rounding_is_right_on_average_and_never_further_than_a_neighbour():
    generator = torch.Generator().manual_seed(0)
    x = torch.tensor([1.0 + 2**-9, -(1.0 + 2**-10), 3e-5, 1e30, -0.0, 1.5]).repeat(20000, 1)
    got = round_stochastically(x, generator)
    assert got.dtype == torch.bfloat16
    gap = (got.float() - x).abs() / x.abs().clamp_min(1e-38)
    assert gap.max() <= 2**-7
    mean = got.double().mean(0)
    # A number lies between two neighbours at most 2^-7 of it apart; the mean of 20,000 within five standard errors.
    assert torch.all((mean - x[0].double()).abs() <= x[0].double().abs() * 2**-7 * 0.5 * 5 / math.sqrt(20000))
    assert torch.equal(got[:, 5].float(), x[:, 5]), "what bfloat16 can hold is not moved"
    assert len(got[:, 0].unique()) == 2
    odd = torch.tensor([math.inf, -math.inf, math.nan])
    kept = round_stochastically(odd, generator)
    assert torch.equal(kept[:2].float(), odd[:2])
    assert kept[2].isnan()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_many_updates_too_small_for_bfloat16_add_up_unless_rounded_to_the_nearest(rounding):
    weight = torch.ones(4096, dtype=torch.bfloat16)
    weight.grad = torch.ones_like(weight)
    generator = torch.Generator().manual_seed(0)
    optimizer = BFloat16AdamW([weight], rounding, generator, lr=2.0**-12, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for _ in range(256):
        optimizer.step()
    moved = 1 - float(weight.double().mean())
    if rounding == "nearest":
        assert moved == 0
    else:
        assert moved == pytest.approx(256 * 2.0**-12, rel=0.05)


def test_the_update_is_torchs_adamw():
    torch.manual_seed(0)
    start = torch.randn(512).bfloat16()
    plain = start.float().requires_grad_()
    theirs = torch.optim.AdamW([plain], **mixed.adamw(64))
    narrow = start.clone()
    ours = BFloat16AdamW([narrow], "kahan", torch.Generator(), **mixed.adamw(64))
    for _ in range(50):
        grad = torch.randn(512).bfloat16()
        plain.grad, narrow.grad = grad.float(), grad
        theirs.step()
        ours.step()
    moved, wanted = narrow.float() + ours.dropped[0].float() - start.float(), plain.detach() - start.float()
    assert float((moved - wanted).norm() / wanted.norm()) < 0.02
    assert float(wanted.norm()) > 0


def test_activations_take_less_memory():
    dims = {**DIMS, "batch": 8}
    peaks = {}
    for name in ("baseline", "optimized", "float16", "kahan"):
        case = case_of(variant(name), dims)
        case.run()
        case.release()
        with LiveBytes() as live:
            case.run()
        peaks[name] = live.peak
    assert peaks["kahan"] < peaks["optimized"] < peaks["baseline"]
    assert peaks["float16"] < peaks["baseline"]


def test_tf32_is_allowed_only_while_it_is_measured():
    before = torch.get_float32_matmul_precision()
    seen = []

    class Watched(mixed.TF32):
        def differentiate(self, loss):
            seen.append(torch.get_float32_matmul_precision())
            super().differentiate(loss)

    case_of(Watched).run()
    assert seen == ["high"]
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_the_prediction_lies_between_no_gain_and_the_ratio_of_rates():
    for raw in WORKLOADS:
        speedup = PAIR.predict(parse_workload(PAIR.name, raw, "test"))
        assert 1 < speedup < mixed.PRODUCTS / mixed.FLOAT32


@pytest.mark.parametrize("name", ["baseline", *NARROW])
def test_what_is_unloaded_holds_its_weights_alone_and_runs_again_when_loaded(name):
    case = case_of(variant(name))
    given = case._inputs
    case.run()
    first = case.losses[0].clone()
    case.unload()
    assert case.optimizer is None
    assert all(param.grad is None for param in case.params.values())
    case.load(given)
    case.run()
    assert torch.equal(case.losses[0], first)


def test_kahans_second_number_starts_with_what_rounding_the_weights_dropped():
    case = case_of(variant("kahan"))
    for dropped, (name, param) in zip(case.optimizer.dropped, case.params.items(), strict=True):
        given = case._inputs[f"weight.{name}"]
        assert float((param.detach().float() + dropped.float() - given).abs().max()) <= 2**-16 * float(
            given.abs().max()
        )
        assert dropped.any()
