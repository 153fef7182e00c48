"""The rounds of a step: waves that are reported while their step continues, and what is left of it."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tones import NUM_TONES, Roles, Synthesizer, Take, Tones, Trainer

from gcore_controller import (
    Context,
    DeviceWork,
    Event,
    Generated,
    RLHFConfig,
    RLHFLoop,
    Round,
    RunStart,
    Stepped,
    Wave,
    run_simulated,
)

CONFIG = RLHFConfig(
    total_steps=4,
    train_batch_size=6,
    test_freq=4,
    filter_groups=True,
    max_num_gen_batches=8,
    reports_waves=True,
)


@dataclass
class Observer:
    """Keeps the rounds of each step, and checks that nothing is sampled while it takes in a wave."""

    num_sampling: int = 0
    sampled: list[int] = field(default_factory=list[int])
    """Prompts of each call of `generate`, since the last step."""
    waves: list[Round] = field(default_factory=list[Round])
    steps: list[tuple[list[Round], list[int], Stepped]] = field(
        default_factory=list[tuple[list[Round], list[int], Stepped]]
    )

    async def __call__(self, event: Event) -> None:
        if isinstance(event, Round):
            for _ in range(3):
                assert self.num_sampling == 0
                await asyncio.sleep(0.5)
            self.waves.append(event)
        if isinstance(event, Stepped):
            self.steps.append(([*self.waves, event.last], self.sampled, event))
            self.waves, self.sampled = [], []


class TimedTones(Tones):
    """Tones of engines whose devices are timed, one of each controller."""

    def __init__(self, prompts: list[int], observer: Observer) -> None:
        super().__init__(prompts)
        self._observer = observer

    async def generate(self, ctx: Context[Roles], wave: Wave[int]) -> Generated[Take]:
        self._observer.num_sampling += 1
        self._observer.sampled.append(len(wave.prompts) + len(wave.unfinished))
        with ctx.roles.devices.stage("gen", f"engine {ctx.rank}"):
            generated = await super().generate(ctx, wave)
        ctx.roles.devices.generated["gen"] += sum(take.tones.size for take in generated.groups)
        self._observer.num_sampling -= 1
        return generated


def run(config: RLHFConfig, *, world_size: int, observer: Observer | None = None) -> Observer:
    observer, logits = observer or Observer(), np.zeros(NUM_TONES)

    async def program(ctx: Context[Any]) -> None:
        roles = Roles(policy=ctx.roles, learner=Trainer(logits, ctx.group))
        modality = TimedTones([5] * 30, observer)
        await RLHFLoop(ctx.with_roles(roles), modality, config, RunStart(), observer).run()

    run_simulated(program, roles=Synthesizer(), world_size=world_size)
    return observer


@given(st.integers(1, 4), st.integers(1, 12), st.integers(1, 5))
@settings(max_examples=15)
def test_each_prompt_and_token_of_a_step_is_in_one_round(
    world_size: int, batch_size: int, max_waves: int
) -> None:
    config = replace(CONFIG, train_batch_size=batch_size, max_num_gen_batches=max_waves)
    for rounds, sampled, stepped in run(config, world_size=world_size).steps:
        assert [done.number for done in rounds] == list(range(1, 1 + len(rounds)))
        assert len(rounds) == stepped.metrics["sampling/waves"]
        assert sum(done.num_prompts for done in rounds) == sum(sampled)
        assert all(done.num_prompts for done in rounds)
        assert len(sampled) == len(rounds) * world_size
        whole = DeviceWork.merge(done.work for done in rounds)
        assert whole.generated == Counter(gen=3 * sum(sampled))
        assert stepped.metrics["perf/generated/gen"] == whole.generated["gen"]
        assert stepped.devices == whole.spans
        assert set(stepped.devices) == {f"engine {rank}" for rank in range(world_size)}


def test_training_is_the_same_whether_waves_are_reported_or_not() -> None:
    def shown(observer: Observer) -> list[dict[str, float]]:
        clocks = ("timing_s/", "perf/throughput")
        return [
            {k: v for k, v in stepped.metrics.items() if not k.startswith(clocks)}
            for _, _, stepped in observer.steps
        ]

    reported = run(CONFIG, world_size=2)
    whole = run(replace(CONFIG, reports_waves=False), world_size=2)
    assert shown(reported) == shown(whole)
    assert max(len(rounds) for rounds, _, _ in reported.steps) > 1
    for rounds, sampled, stepped in whole.steps:
        assert [(done.number, done.num_prompts) for done in rounds] == [(1, sum(sampled))]
        assert rounds[0].work.spans == stepped.devices


@pytest.mark.parametrize("schedule", ["one_step_off", "async"])
def test_waves_that_are_sampled_ahead_are_not_reported(schedule: Any) -> None:
    observer = run(replace(CONFIG, schedule=schedule), world_size=2)
    assert all(len(rounds) == 1 for rounds, _, _ in observer.steps)
    assert max(stepped.metrics["sampling/waves"] for _, _, stepped in observer.steps) > 1


@dataclass
class Failing(Observer):
    async def __call__(self, event: Event) -> None:
        if isinstance(event, Round):
            raise RuntimeError("no engine left")


def test_an_error_while_a_wave_is_taken_in_ends_the_run() -> None:
    """The other controllers do not wait for the first one, which reports."""
    with pytest.raises(RuntimeError, match="no engine left"):
        run(CONFIG, world_size=3, observer=Failing())
