"""Expected lengths: what is remembered, what engines and generation do with them, and that no token depends on it."""

from collections.abc import Sequence
from contextlib import nullcontext
from random import Random
from typing import Any

import numpy as np
import pytest
from engine_oracles import EOS_TOKEN_IDS, TinyModel, collect, make_request
from hypothesis import example, given, strategies as st

from gcore_rollout import (
    EngineReplicas,
    Generation,
    Group,
    HFEngine,
    LengthHistory,
    Prompt,
    RequestError,
    RewardRunner,
    RolloutRoles,
    SamplingParams,
)
from gcore_rollout.groups import MeasuredLength, measure_length


def prompt_of(number: int, source: str = "") -> Prompt:
    return Prompt(
        text="", token_ids=(number, number + 1), row={"data_source": source} if source else {}
    )


def measured(number: int, length: int, source: str = "") -> MeasuredLength:
    return measure_length(prompt_of(number, source), [length])


def test_a_prompt_has_its_own_lengths_and_others_those_of_their_source() -> None:
    history = LengthHistory()
    assert history.expected(prompt_of(0, "math")) is None
    history.add([measure_length(prompt_of(0, "math"), [10, 30]), measured(1, 5, "code")])
    assert history.expected(prompt_of(0, "math")) == 20
    assert history.expected(prompt_of(7, "math")) == 20
    assert history.expected(prompt_of(7, "code")) == 5
    assert history.expected(prompt_of(7, "chat")) is None
    # Later measurements of a prompt have half the weight, and hardly any in its source.
    history.add([measured(0, 40, "math")])
    assert history.expected(prompt_of(0, "math")) == 30
    assert history.expected(prompt_of(7, "math")) == 20


lengths = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 99), st.sampled_from(["", "a", "b", "c"])),
    max_size=30,
)


@given(lengths, st.randoms(use_true_random=False))
@example([(0, 1, ""), (0, 1, "a"), (0, 1, "b")], Random(0))  # one prompt in three sources
def test_its_memory_is_bounded_and_its_state_is_all_there_is(
    seen: list[tuple[int, int, str]], random: Any
) -> None:
    """Measurements of one wave may come in any order, as they do from any number of controllers."""
    history, other = (LengthHistory(max_prompts=4, max_sources=2) for _ in range(2))
    for start in range(0, len(seen), 5):
        wave = [measured(*entry) for entry in seen[start : start + 5]]
        history.add(wave)
        random.shuffle(wave)
        resumed = LengthHistory(max_prompts=4, max_sources=2)
        resumed.load_state(other.state())
        resumed.add(wave)
        other = resumed
    state = history.state()
    assert len(state["keys"]) <= 4
    assert len(state["sources"]) <= 2
    for name, values in other.state().items():
        assert np.array_equal(values, state[name]) if name != "sources" else values == state[name]


def test_an_expectation_is_at_least_a_token() -> None:
    with pytest.raises(
        RequestError, match="expected_tokens of request 'r' is 0; expected at least 1, or None"
    ):
        make_request("r", 2, expected_tokens=0)


class CountingEngine(HFEngine):
    """Counts its decoding steps."""

    num_steps = 0

    def _step(self) -> None:
        self.num_steps += 1
        super()._step()


def no_reward(prompt: str, completion: str, row: Any) -> float:
    return float(len(completion))


class Digits:
    """A tokenizer that decodes to numbers."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(str, token_ids))


async def generated(
    model: TinyModel, history: LengthHistory | None
) -> tuple[dict[int, Group], Generation, list[int]]:
    """Generate 24 groups of two responses on two engines of four places; return the engines' steps, too."""
    engines = [
        CountingEngine.from_pretrained(model.path, max_num_seqs=4, eos_token_ids=EOS_TOKEN_IDS)
        for _ in "ab"
    ]
    roles = RolloutRoles(
        policy=EngineReplicas(engines), reward=RewardRunner(no_reward), tokenizer=Digits()
    )
    sampling = SamplingParams(max_tokens=100, temperature=1.5)
    generation = Generation(
        roles=roles, sampling=sampling, n=2, seed=3, time_stage=nullcontext, history=history
    )
    groups, _ = await generation.run([(i, prompt_of(i)) for i in range(24)])
    await roles.policy.close()
    return (
        {group.prompt_index: group for group in groups},
        generation,
        [engine.num_steps for engine in engines],
    )


@pytest.mark.slow
async def test_the_longest_first_are_the_same_samples_in_fewer_steps(tied: TinyModel) -> None:
    history = LengthHistory()
    before, generation, steps = await generated(tied, None)
    history.add(generation.measured)
    after, _, fewer = await generated(tied, history)
    assert list(after) == list(before)
    for index, group in before.items():
        for one, other in zip(group.responses, after[index].responses, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
    lower_bound = sum(group.lengths.sum() for group in before.values()) / 8
    print(f"{max(steps)} steps, with expected lengths {max(fewer)}; at least {lower_bound}")
    assert max(fewer) < max(steps)
    assert max(fewer) <= 1.1 * lower_bound


async def test_work_is_counted_in_expected_tokens(tied: TinyModel) -> None:
    """One request of ten times the expected length weighs as much as ten others."""
    engines = [
        CountingEngine.from_pretrained(tied.path, max_num_seqs=64, eos_token_ids=[]) for _ in "ab"
    ]
    replicas = EngineReplicas(engines)
    requests = [make_request("long", 2, max_tokens=40, expected_tokens=40)]
    requests += [make_request(f"r{i}", 2, max_tokens=40, expected_tokens=4) for i in range(10)]
    await collect(replicas, *requests)
    assert [engine.stats().completion_tokens for engine in engines] == [40, 400]
    await replicas.close()


async def test_a_response_that_reaches_the_length_defers_its_prompt(tied: TinyModel) -> None:
    """Other groups are those of a run without such a length, and deferred ones are cut short at once."""
    engine = HFEngine.from_pretrained(tied.path, max_num_seqs=4, eos_token_ids=EOS_TOKEN_IDS)
    roles = RolloutRoles(policy=engine, reward=RewardRunner(no_reward), tokenizer=Digits())
    prompts = [(i, prompt_of(i)) for i in range(12)]
    found: list[dict[int, Group]] = []
    for max_tokens, defers in ((64, False), (48, True)):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=1.5)
        generation = Generation(
            roles=roles, sampling=sampling, n=2, seed=1, time_stage=nullcontext, defers=defers
        )
        groups, unfinished = await generation.run(prompts)
        found.append({group.prompt_index: group for group in groups})
        assert unfinished == []
    whole, short = found
    long = [index for index, group in whole.items() if group.lengths.max() >= 48]
    assert generation.deferred == long
    assert 0 < len(long) < 12
    assert set(short) == set(range(12)) - set(long)
    for index, group in short.items():
        for one, other in zip(group.responses, whole[index].responses, strict=True):
            assert np.array_equal(one.token_ids, other.token_ids)
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    await engine.close()


async def test_a_group_starts_as_another_ends_and_none_waits_in_the_engine(
    tied: TinyModel,
) -> None:
    """The engine has keys and values for three groups; with a quota the others continue in the next call."""
    options: Any = {"max_model_len": 128, "kv_cache_bytes": 6 * 128 << 10}
    engine = HFEngine.from_pretrained(tied.path, eos_token_ids=EOS_TOKEN_IDS, **options)
    assert engine.stats().num_slots == 6
    roles = RolloutRoles(policy=engine, reward=RewardRunner(no_reward), tokenizer=Digits())
    left = [(i, prompt_of(i)) for i in range(24)]
    numbers: list[int] = []

    async def take(count: int) -> list[tuple[int, Prompt]]:
        stats = engine.stats()
        assert stats.num_waiting == 0
        assert stats.num_running + 2 * count <= 6
        taken = left[:count]
        del left[:count]
        numbers.append(len(taken))
        return taken

    async def generate(
        quota: int, unfinished: list[Group], **options: Any
    ) -> tuple[list[Group], list[Group]]:
        generation = Generation(
            roles=roles,
            sampling=SamplingParams(max_tokens=100, temperature=1.5),
            n=2,
            seed=1,
            time_stage=nullcontext,
            quota=quota,
            slots=engine.stats().num_slots,
            **options,
        )
        continued = [(group, prompt_of(group.prompt_index)) for group in unfinished]
        return await generation.run(unfinished=continued, take=take)

    complete, unfinished = await generate(8, [])
    # None is taken at the end, for which there would be no use.
    assert sum(numbers) == len(complete) + len(unfinished) == 24 - len(left)
    assert 8 <= len(complete) <= 9
    assert 1 <= len(unfinished) <= 3
    before = {group.prompt_index: group for group in unfinished}
    lengths = [group.lengths.tolist() for group in unfinished]
    await engine.update_weights(tied.old.state_dict().items(), version=1)
    complete, unfinished = await generate(0, unfinished)
    assert (complete, [group.lengths.tolist() for group in unfinished]) == ([], lengths)
    complete, _ = await generate(1, unfinished, may_stop=lambda versions: 0 not in versions)
    assert before.keys() <= {group.prompt_index for group in complete}
    for group in complete:
        if group.prompt_index in before:
            assert group.oldest_version == 0
    await engine.close()
