"""Groups of episodes: their common prompt, and episodes that have none, take long or are long."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine
from numpy.typing import NDArray

from gcore_rollout import (
    Completion,
    Engine,
    EpisodeError,
    EpisodeRole,
    Generation,
    Group,
    Prompt,
    RewardRunner,
    RolloutRoles,
    RunningEpisodes,
    SamplingParams,
)
from gcore_rollout.groups import share_prompt


def make_episode(prompt: list[int], tokens: list[int], **fields: Any) -> Completion:
    return Completion(
        request_id="",
        index=0,
        token_ids=np.array(tokens),
        log_probs=np.full(len(tokens), -1.0, np.float32),
        weight_versions=np.zeros(len(tokens), np.int32),
        finish_reason="stop",
        prompt_ids=np.array(prompt),
        turns=("a turn",),
        **fields,
    )


def list_paths(prompt_ids: NDArray[np.int64], response: Completion) -> list[list[int]]:
    """Return all that each token follows, and the token itself."""
    parents = list(range(-1, response.token_ids.size - 1))
    if response.forks is not None:
        for token, parent in response.forks.tolist():
            parents[token] = parent
    paths: list[list[int]] = []
    for token, parent in zip(response.token_ids.tolist(), parents, strict=True):
        before: list[int] = []
        if parent == -1:
            before = prompt_ids.tolist()
        elif parent >= 0:
            before = paths[parent]
        paths.append([*before, token])
    return paths


def make_random_episode(rng: random.Random) -> Completion:
    """Return an episode with forks, whose prompt starts with 1."""
    size = rng.randint(1, 8)
    forks: list[tuple[int, int]] = []
    for token in range(1, size):
        parent = rng.choice([-2, *range(-1, token)])
        if rng.random() < 0.4 and parent != token - 1:
            forks.append((token, parent))
    return make_episode(
        [1, *rng.choices((2, 3), k=rng.randint(0, 4))],
        rng.choices(range(10, 20), k=size),
        mask=np.array([rng.random() < 0.5 for _ in range(size)]),
        forks=np.array(forks) if forks else None,
        credit=np.arange(size, dtype=np.float32),
    )


@pytest.mark.parametrize("seed", range(50))
def test_episodes_that_start_differently_share_a_prompt(seed: int) -> None:
    """Each token follows what it followed, and what is added counts for nothing."""
    rng = random.Random(seed)
    group = Group(prompt_index=0, prompt_ids=np.array([9]))
    episodes = [make_random_episode(rng) for _ in range(4)]
    for episode in episodes:
        response = share_prompt(group, episode)
        group.responses.append(response)
    for episode, response in zip(episodes, group.responses, strict=True):
        assert episode.prompt_ids is not None
        assert episode.mask is not None
        assert response.mask is not None
        assert response.credit is not None
        num_added = response.token_ids.size - episode.token_ids.size
        assert list_paths(group.prompt_ids, response)[num_added:] == list_paths(
            episode.prompt_ids, episode
        )
        assert response.mask[num_added:].tolist() == episode.mask.tolist()
        assert response.credit[num_added:].tolist() == list(range(episode.token_ids.size))
        assert not response.mask[:num_added].any()
        assert not response.log_probs[:num_added].any()
        assert (response.weight_versions[:num_added] == -1).all()


def score(prompt: str, completion: str, row: Any) -> float:
    del prompt, row
    return float(len(completion))


@pytest.mark.parametrize("on_error", ["drop", "raise"])
async def test_an_episode_without_a_common_start_is_one_that_failed(on_error: Any) -> None:
    starts = deque([[1, 2], [2, 2]])

    async def play(
        policy: Engine, prompt: Prompt, request_id: str, sampling: SamplingParams, seed: int
    ) -> Completion:
        del policy, prompt, request_id, sampling, seed
        return make_episode(starts.popleft(), [5, 6])

    role = EpisodeRole(play=play, on_error=on_error)
    policy: Any = FakeEngine()
    roles = RolloutRoles(policy=policy, reward=RewardRunner(score), tokenizer=None, episodes=role)
    sampling = SamplingParams(max_tokens=4)
    generation = Generation(roles=roles, sampling=sampling, n=2, seed=0, time_stage=nullcontext)
    prompts = [(0, Prompt(text="", token_ids=(1,), row={}))]
    if on_error == "raise":
        with pytest.raises(EpisodeError, match="start with different tokens, 1 and 2"):
            await generation.run(prompts)
    else:
        assert await generation.run(prompts) == ([], [])
        [failure] = role.failures.drain()[1]
        assert failure.kind.startswith("EpisodeError")


class Players:
    """Plays episodes of one token, which end when the test says so."""

    def __init__(self, failing: Sequence[str] = (), sizes: Sequence[int] = ()) -> None:
        self.num_started = Counter[str]()
        self.num_cancelled = Counter[str]()
        self.may_end: dict[str, asyncio.Event] = {}
        self._failing = failing
        self._sizes = sizes

    async def play(
        self, policy: Engine, prompt: Prompt, request_id: str, sampling: SamplingParams, seed: int
    ) -> Completion:
        del policy, prompt, sampling, seed
        self.num_started[request_id] += 1
        try:
            await self.may_end.setdefault(request_id, asyncio.Event()).wait()
        except asyncio.CancelledError:
            self.num_cancelled[request_id] += 1
            raise
        if request_id in self._failing:
            raise EpisodeError(request_id)
        size = self._sizes[int(request_id[0])] if self._sizes else 1
        return make_episode([1, 7], [5] * size)

    def let_end(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.may_end.setdefault(request_id, asyncio.Event()).set()

    def roles(self, engine: Any) -> RolloutRoles:
        role = EpisodeRole(play=self.play, on_error="drop")
        return RolloutRoles(
            policy=engine, reward=RewardRunner(score), tokenizer=None, episodes=role
        )


def make_generation(players: Players, engine: Any, **options: Any) -> Generation:
    roles = players.roles(engine)
    return Generation(
        roles=roles, sampling=SAMPLING, n=2, seed=0, time_stage=nullcontext, **options
    )


SAMPLING = SamplingParams(max_tokens=4)
PROMPTS = [(i, Prompt(text="", token_ids=(1,), row={})) for i in range(3)]


async def test_episodes_that_a_quota_cuts_short_go_on() -> None:
    """They belong to the next call; a group that failed is not played on, nor is one that starts again."""
    players = Players(failing=["2/0"])
    engine = FakeEngine(version=3)
    running = RunningEpisodes(engine)
    players.let_end("0/0", "0/1", "1/0", "2/0")
    [first], [second] = await make_generation(players, engine, quota=1, running=running).run(
        PROMPTS
    )
    assert (first.prompt_index, second.prompt_index) == (0, 1)
    assert [response.index for response in second.responses] == [0]
    assert (second.running_version, second.oldest_version) == (3, 0)
    await asyncio.sleep(0)
    assert players.num_cancelled == {"2/1": 1}
    # A checkpoint has what is finished, and those that are running start again.
    restored = Group.from_state(second.state())
    assert restored.running_version is None
    assert len(restored.responses) == 1

    players.let_end("1/1")
    engine.weight_version = 4
    unfinished = [(second, PROMPTS[1][1])]
    groups, cut_short = await make_generation(players, engine, quota=1, running=running).run(
        unfinished=unfinished
    )
    [whole] = groups
    assert not cut_short
    assert [response.index for response in whole.responses] == [0, 1]
    assert whole.prompt_ids.tolist() == [1, 7]
    assert set(players.num_started.values()) == {1}

    players.may_end.clear()
    running.start("1/0", lambda: players.play(engine, PROMPTS[1][1], "1/0", SAMPLING, 0))
    await asyncio.sleep(0)
    players.let_end("1/1")
    old_event = players.may_end.pop("1/0")
    players.let_end("1/0")
    # As where the group is dropped, whose prompt is sampled again.
    running.cancel("1/")
    [whole], _ = await make_generation(players, engine, quota=1, running=running).run([PROMPTS[1]])
    assert not old_event.is_set()
    assert [response.index for response in whole.responses] == [0, 1]
    assert players.num_cancelled["1/0"] == 1
    await running.close()


async def test_running_episodes_end_with_the_run() -> None:
    players = Players()
    running = RunningEpisodes(FakeEngine())
    for index, prompt in PROMPTS:
        name = f"{index}/0"
        running.start(name, partial(players.play, FakeEngine(), prompt, name, SAMPLING, 0))
    await asyncio.sleep(0)
    await running.close()
    assert players.num_cancelled == {"0/0": 1, "1/0": 1, "2/0": 1}


async def test_a_long_episode_defers_its_prompt() -> None:
    """The others of its group are not played to their end."""
    players = Players(sizes=[3, 4, 3])
    players.let_end("0/0", "0/1", "1/0", "2/0", "2/1")
    generation = make_generation(players, FakeEngine(), defers=True)
    groups, cut_short = await generation.run(PROMPTS)
    assert [group.prompt_index for group in groups] == [0, 2]
    assert not cut_short
    assert generation.deferred == [1]
    assert players.num_cancelled == {"1/1": 1}
