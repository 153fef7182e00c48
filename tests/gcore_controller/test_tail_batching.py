"""Tail batching: each prompt is trained on once, in batches that depend on lengths alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tones import Roles, Synthesizer, Take, Tones, Trainer

from gcore_controller import (
    Context,
    Generated,
    RLHFConfig,
    State,
    TrainingBatch,
    Wave,
    run_simulated,
)
from gcore_controller.rlhf.batch_producer import BatchProducer

CONFIG = RLHFConfig(
    total_steps=1, train_batch_size=6, test_freq=1, tail_batching=True, over_sample_rate=0.5
)


class Melodies(Tones):
    """Takes whose longest has the length that ``lengths`` gives for its prompt index, and one that is dropped is -1.

    Only takes of even length have a signal.
    """

    takes_others = False

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__([3] * 17)
        self._lengths = lengths

    def takes_prompts(self, ctx: Context[Roles]) -> bool:
        del ctx
        return self.takes_others

    def longest(self, group: Take) -> int:
        return len(group.tones)

    async def generate(self, ctx: Context[Roles], wave: Wave[int]) -> Generated[Take]:
        asked = list(wave.prompts)
        while wave.take and (taken := await wave.take(2)):
            asked += taken
        takes: list[Take] = []
        deferred: list[int] = []
        with ctx.timer.stage("gen"):
            for index, _ in asked:
                length = self._lengths[index % len(self._lengths)]
                if wave.max_length is not None and length >= wave.max_length:
                    deferred.append(index)
                elif length > 0:
                    scores = np.array([0.0, float(length % 2 == 0)])
                    takes.append(
                        Take(
                            index,
                            np.zeros(length, np.int64),
                            scores,
                            ctx.roles.policy.weight_version,
                        )
                    )
        return Generated(groups=takes, deferred=deferred)


class ShoutedMelodies(Melodies):
    """Controllers take prompts from each other."""

    takes_others = True


@dataclass
class Run:
    indices: list[list[int]]
    """Prompt indices of each step's groups, over all controllers."""
    metrics: list[dict[str, float]]
    states: list[list[State]]

    @property
    def trained(self) -> list[int]:
        return [index for step in self.indices for index in step]

    @property
    def queued(self) -> list[int]:
        tail = self.states[-1][0]["tail"]
        return sorted([*tail["deferred"], *tail["again"]])

    @property
    def num_drawn(self) -> int:
        return self.states[-1][0]["loader"]["cursor"]


def run(
    lengths: Sequence[int],
    num_steps: int,
    config: RLHFConfig = CONFIG,
    *,
    world_size: int = 1,
    modality: type[Melodies] = Melodies,
    state: State | None = None,
) -> Run:
    async def program(ctx: Context[Synthesizer]) -> list[TrainingBatch[Take]]:
        roles = Roles(policy=ctx.roles, learner=Trainer(np.zeros(8), ctx.group))
        producer = BatchProducer(
            ctx.with_roles(roles), modality(lengths), config, first_step=0, state=state
        )
        return [await producer.sample() for _ in range(num_steps)]

    steps = list(
        zip(*run_simulated(program, roles=Synthesizer(), world_size=world_size), strict=True)
    )
    return Run(
        indices=[sorted(g.prompt_index for batch in step for g in batch.groups) for step in steps],
        metrics=[step[0].metrics for step in steps],
        states=[[batch.state for batch in step] for step in steps],
    )


heavy_tails = st.lists(st.integers(1, 12).map(lambda x: x**3), min_size=1, max_size=60)


@given(heavy_tails, st.integers(1, 12), st.sampled_from([0, 40]), st.sampled_from([0.25, 0.5, 1.0]))
@settings(max_examples=15, deadline=None)
def test_each_prompt_is_trained_on_once_or_queued(
    lengths: list[int], num_steps: int, short_length: int, over_sample_rate: float
) -> None:
    config = replace(CONFIG, short_length=short_length, over_sample_rate=over_sample_rate)
    alone = run(lengths, num_steps, config)
    assert [len(step) for step in alone.indices] == [CONFIG.train_batch_size] * num_steps
    assert sorted([*alone.trained, *alone.queued]) == list(range(alone.num_drawn))
    # The queue stays below a batch of deferred prompts, those of a step's waves, and its surplus.
    assert len(alone.queued) <= 4 * CONFIG.train_batch_size * (1 + over_sample_rate)
    for world_size, modality in ((2, Melodies), (4, ShoutedMelodies)):
        together = run(lengths, num_steps, config, world_size=world_size, modality=modality)
        assert (together.indices, together.metrics) == (alone.indices, alone.metrics)
        assert [state["tail"] for state in together.states[-1]] == [
            alone.states[-1][0]["tail"]
        ] * world_size


@given(
    st.lists(st.integers(-1, 12).map(lambda x: x**3), min_size=1, max_size=60).filter(any),
    st.integers(1, 3),
)
@settings(max_examples=15, deadline=None)
def test_with_a_filter_and_failures_nothing_else_is_lost(
    lengths: list[int], max_num_gen_batches: int
) -> None:
    config = replace(CONFIG, filter_groups=True, max_num_gen_batches=max_num_gen_batches)
    found = run(lengths, 8, config, world_size=2)
    lost = set(range(found.num_drawn)) - {*found.trained, *found.queued}
    assert len(found.trained) + len(found.queued) + len(lost) == found.num_drawn
    of_prompt = {index: lengths[index % len(lengths)] for index in range(found.num_drawn)}
    assert all(of_prompt[index] <= 0 or of_prompt[index] % 2 for index in lost)
    assert all(of_prompt[index] > 0 and of_prompt[index] % 2 == 0 for index in found.trained)


@given(heavy_tails, st.integers(1, 7), st.sampled_from([(1, 1), (2, 2), (4, 1), (1, 3)]))
@settings(max_examples=15, deadline=None)
def test_a_resumed_run_is_an_uninterrupted_one(
    lengths: list[int], at: int, world_sizes: tuple[int, int]
) -> None:
    before, after = world_sizes
    whole = run(lengths, 8, world_size=before)
    rest = run(lengths, 8 - at, world_size=after, state=whole.states[at - 1][0])
    assert rest.indices == whole.indices[at:]
    assert rest.metrics == whole.metrics[at:]


def test_short_steps_are_short_and_long_ones_take_what_was_deferred() -> None:
    """One prompt in eight has a length of 1000."""
    lengths = [10, 20, 1000, 15, 12, 18, 11, 13]
    found = run(lengths, 40, replace(CONFIG, train_batch_size=16))
    by_step = [{lengths[index % 8] for index in step} for step in found.indices]
    long = [step for step, row in enumerate(found.metrics) if row["sampling/long_round"]]
    assert len(long) >= 4
    assert all(1000 in by_step[step] for step in long)
    # The first step has measured the lengths; in the others no short response waits for a long one.
    assert not any(1000 in by_step[step] for step in range(1, 40) if step not in long)
    assert all(
        row["sampling/dropped_groups"] == row["sampling/stale_groups"] == 0 for row in found.metrics
    )


def test_the_length_follows_what_it_defers() -> None:
    """Where responses grow tenfold, so does the length of short steps."""
    growing = [10 * 10 ** (i / 600) for i in range(1200)]
    found = run([int(length) + i % 7 for i, length in enumerate(growing)], 100)
    lengths = [row["sampling/short_length"] for row in found.metrics]
    assert 10 <= lengths[0] <= 20
    assert found.num_drawn > 600
    assert lengths[-1] == pytest.approx(growing[found.num_drawn], rel=0.3)


@pytest.mark.parametrize("fields", [{"schedule": "async"}, {"partial_rollout": True}])
def test_it_needs_samples_of_the_present_weights(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="with tail_batching; expected 'sync' and False"):
        run([1], 1, replace(CONFIG, **fields))


def test_a_modality_without_lengths_does_not_support_it() -> None:
    class Plain(Melodies):
        longest = Tones.longest

    with pytest.raises(NotImplementedError, match="Plain does not support tail batching"):
        run([1], 1, modality=Plain)
