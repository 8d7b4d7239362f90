"""The scheduler and the engines of a role by themselves: who holds blocks, who waits for whom, what is carried out."""

from __future__ import annotations

from dataclasses import replace

from impls.serving.request import Request, Sampling, Sequence, State
from impls.serving.role_engines import DecodeEngine, PrefillEngine, RoleScheduler
from impls.serving.scheduler import EngineConfig, Step

CONFIG = EngineConfig(max_running=4, max_step_tokens=8, block_size=4, num_blocks=8, context=96)


def run(scheduler: RoleScheduler) -> Step:
    """One step, every chunk of it booked; a token of 1 where one is drawn."""
    step = scheduler.schedule()
    for chunk in step.chunks:
        scheduler.advance(chunk, 1 if chunk.samples else None)
    return step


def held(scheduler: RoleScheduler, tokens: int) -> Sequence:
    """A sequence that holds blocks for so many tokens and does not run."""
    sequence = Sequence(Request(f"h{tokens}", [1] * tokens, Sampling(max_tokens=20)))
    scheduler.blocks.extend(sequence, tokens)
    scheduler.hold(sequence)
    return sequence


def test_a_prompt_waits_for_blocks_that_are_held_instead_of_giving_up_its_own():
    scheduler = RoleScheduler(CONFIG, lambda step: None)
    scheduler.add(Sequence(Request("a", [1] * 24, Sampling(max_tokens=2))))
    assert run(scheduler).tokens == 8
    holder = held(scheduler, 24)
    for _ in range(3):
        step = run(scheduler)
        assert not step.chunks
        assert not step.preempted
    scheduler.finish(holder)
    assert [run(scheduler).tokens for _ in range(3)] == [8, 8, 1]


def test_moves_of_a_step_without_chunks_are_carried_out():
    carried: list[Step] = []
    config = replace(CONFIG, preemption="swap", host_blocks=4)
    scheduler = RoleScheduler(config, carried.append)
    scheduler.add(Sequence(Request("a", [1] * 24, Sampling(max_tokens=2))))
    run(scheduler)
    short = held(scheduler, 3)
    held(scheduler, 20)
    short.computed = 2
    scheduler.start(short)
    # The prompt needs two blocks for its next chunk and gets one, the short sequence's, which goes to the host.
    step = scheduler.schedule()
    assert not step.chunks
    assert step.preempted == [short]
    assert short.state is State.SWAPPED
    assert len(step.swap_out) == 1
    assert carried == [step]


def test_nobody_is_let_in_before_those_who_were_preempted(fake):
    config = replace(CONFIG, num_blocks=20)
    engine = DecodeEngine(fake.Runner(97, 20, 4), config)
    assert engine.reserve(Request("a", [1] * 5, Sampling(max_tokens=4))) is not None
    engine.scheduler.add(Sequence(Request("preempted", [1, 2])))
    assert engine.reserve(Request("b", [1] * 5, Sampling(max_tokens=4))) is None
    engine.scheduler.waiting.clear()
    assert engine.reserve(Request("b", [1] * 5, Sampling(max_tokens=4))) is not None


def test_room_is_granted_for_slots_and_blocks_that_are_there(fake):
    engine = DecodeEngine(fake.Runner(97, 8, 4), replace(CONFIG, max_running=2))
    first = engine.reserve(Request("a", [1] * 8, Sampling(max_tokens=4)))
    assert first is not None
    assert len(first.blocks) == 3, "two blocks of a prompt, and one for the token that it is followed by"
    assert engine.targets(first) == first.blocks[:2]
    # Five blocks are free, and one of them is kept for those who are there to grow.
    assert engine.reserve(Request("long", [1] * 16, Sampling(max_tokens=4))) is None
    assert engine.reserve(Request("b", [1] * 12, Sampling(max_tokens=4))) is not None
    assert engine.reserve(Request("no slot", [1], Sampling(max_tokens=4))) is None
    engine.drop(first)
    assert engine.scheduler.blocks.device.free == 4
    assert engine.reserve(Request("c", [1], Sampling(max_tokens=4))) is not None


def test_a_prefill_engine_tells_of_a_prompt_before_its_last_step_and_again_when_its_token_is_there(fake):
    config = replace(CONFIG, num_blocks=20)
    engine = PrefillEngine(fake.Runner(97, 20, 4), config, decode_cache_tokens=80)
    told: list[tuple[str, int]] = []
    engine.nearly = lambda sequence: told.append((sequence.id, sequence.computed))
    engine.submit(Request("one token", [1, 2], Sampling(max_tokens=1)))
    engine.submit(Request("long", [1] * 20, Sampling(max_tokens=3)))
    finished: list[str] = []
    for _ in range(4):
        finished += [output.id for output in engine.step() if output.finished]
        assert bool(told) == bool(engine.ready), "a token is there after the step that draws it"
    assert told == [("long", 14)]
    assert finished == ["one token"]
    assert [sequence.id for sequence in engine.take_ready()] == ["long"]
    assert not engine.idle
    assert not engine.busy, "what waits to be read needs no step"
