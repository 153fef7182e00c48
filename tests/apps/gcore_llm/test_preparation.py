"""From scored groups to advantages: what is masked out is never read, and what is not finite is named."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gcore_controller.runtimes.inline import run_inline
from gcore_llm.learning.config import AlgorithmConfig
from gcore_llm.learning.preparation import has_signal, prepare, unscored_samples
from gcore_rollout import Completion, Group
from gcore_rollout.groups import share_prompt
from gcore_trainer import (
    BatchError,
    KLControlConfig,
    KLController,
    RolloutCorrectionConfig,
    Sample,
    get_advantage_estimator,
)
from gcore_trainer.advantages.estimator import ESTIMATORS

Masks = list[list[bool]]
MASKS: Masks = [[True, True, False, True, False], [False, True, True], [False, False]]
"""Of three responses to a prompt; the first ends in a token that the policy did not write."""


def prepared(
    algorithm: AlgorithmConfig, samples: list[Sample], scores: list[float]
) -> tuple[list[Sample], dict[str, float]]:
    """The samples of one group, by one controller."""
    responses = [
        Completion(
            request_id="",
            index=0,
            finish_reason="stop",
            token_ids=s.response_ids,
            log_probs=np.zeros(s.response_ids.size, np.float32),
            weight_versions=np.zeros(s.response_ids.size, np.int32),
            score=score,
            parts={"right": score},
        )
        for s, score in zip(samples, scores, strict=True)
    ]
    group = Group(prompt_index=7, prompt_ids=np.arange(3), responses=responses, greedy_score=0.25)

    async def program(context: Any) -> dict[str, float]:
        kl = KLController(algorithm.kl_ctrl)
        return await prepare(
            [group],
            [samples],
            algorithm,
            kl=kl,
            baselines={},
            max_response_length=8,
            group=context.group,
        )

    [metrics] = asyncio.run(run_inline(program, roles=None))
    return samples, metrics


def make_episode(*turns: tuple[str, float], num_given: int = 1) -> Completion:
    """Return an episode whose turns, each two tokens of an agent's with a value, have tokens of others between them."""
    size = (2 + num_given) * len(turns)
    credit = np.zeros(size, np.float32)
    mask = np.zeros(size, np.bool_)
    spans: dict[str, list[tuple[int, int]]] = {}
    for number, (agent, value) in enumerate(turns):
        start = (2 + num_given) * number
        mask[start : start + 2] = True
        credit[start : start + 2] = value
        spans.setdefault(agent, []).append((start, start + 2))
    return Completion(
        request_id="",
        index=0,
        finish_reason="stop",
        token_ids=np.arange(size),
        log_probs=np.zeros(size, np.float32),
        weight_versions=np.zeros(size, np.int32),
        mask=mask,
        credit=credit,
        agents={agent: np.array(turns) for agent, turns in spans.items()},
    )


def prepare_groups(
    groups: list[Group], algorithm: AlgorithmConfig, baselines: dict[str, float]
) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
    """Return the advantages of episodes, which have equal scores, and the metrics; two controllers share the groups."""

    def make_sample(response: Completion) -> Sample:
        return Sample(
            prompt_ids=np.arange(3), response_ids=response.token_ids, response_mask=response.mask
        )

    samples = [list(map(make_sample, group.responses)) for group in groups]

    async def program(context: Any) -> dict[str, float]:
        kl = KLController(algorithm.kl_ctrl)
        mine = slice(context.rank, None, context.world_size)
        own_baselines = dict(baselines)
        metrics = await prepare(
            groups[mine],
            samples[mine],
            algorithm,
            kl=kl,
            baselines=own_baselines,
            max_response_length=8,
            group=context.group,
        )
        if context.rank == 0:
            baselines.update(own_baselines)
        return metrics

    [metrics, *_] = asyncio.run(run_inline(program, roles=None, world_size=min(len(groups), 2)))
    advantages: list[NDArray[np.float32]] = []
    for group_samples in samples:
        for sample in group_samples:
            assert sample.advantages is not None
            advantages.append(sample.advantages)
    return advantages, metrics


def prepare_episodes(*responses: Completion) -> tuple[list[NDArray[np.float32]], dict[str, float]]:
    """Return the advantages of one group's episodes, which have equal scores, and the metrics."""
    group = Group(prompt_index=7, prompt_ids=np.arange(3), responses=list(responses))
    return prepare_groups([group], AlgorithmConfig(), {})


def test_credit_of_turns_is_against_the_mean_return_of_the_group() -> None:
    """Of two episodes with equal scores; the metrics are of these advantages, too."""
    responses = make_episode(("", 1.0), ("", 3.0)), make_episode(("", 0.0), ("", 0.0))
    advantages, metrics = prepare_episodes(*responses)
    # The mean of 2 and 0.
    np.testing.assert_allclose(advantages[0], [0.0, 0.0, 0.0, 2.0, 2.0, 0.0])
    np.testing.assert_allclose(advantages[1], [-1.0, -1.0, 0.0, -1.0, -1.0, 0.0])
    assert metrics["critic/advantages/max"] == 2.0
    assert metrics["critic/advantages/min"] == -1.0
    assert has_signal(metrics, needs_scores=False)


def test_each_agent_has_a_baseline_of_its_own() -> None:
    """A(turn) = V(turn) - sum over sessions s with turns of its agent of mean(V of these turns in s) / their number.

    The third session has no turn of b, and is no 0 for it.
    """
    sessions = [
        [("a", 1.0), ("b", -1.0), ("a", 4.0)],
        [("b", 5.0), ("a", 2.0)],
        [("a", 3.5)],
    ]
    advantages, _ = prepare_episodes(*(make_episode(*turns) for turns in sessions))
    baseline = {
        "a": ((1.0 + 4.0) / 2 + 2.0 + 3.5) / 3,
        "b": (-1.0 + 5.0) / 2,
    }
    for session, turns in enumerate(sessions):
        expected: list[float] = []
        for agent, value in turns:
            advantage = value - baseline[agent]
            expected += [advantage, advantage, 0.0]
        np.testing.assert_allclose(advantages[session], expected, atol=1e-6)


@pytest.mark.parametrize(("other", "expected"), [(2.0, True), (1.0, False)])
def test_a_group_of_equal_scores_is_worth_keeping_if_its_agents_differ_in_credit(
    other: float, expected: bool
) -> None:
    """As in a game of two players, where a session's rewards add up to 0."""
    won = make_episode(("a", 1.0), ("b", -1.0))
    lost = make_episode(("a", other), ("b", -other))
    group = Group(prompt_index=0, prompt_ids=np.arange(3), responses=[won, lost])
    assert group.has_signal == expected


def test_turns_of_an_episode_that_starts_later_keep_their_credit() -> None:
    """The first messages of a group's episodes differ, and what differs is a part of the responses."""
    group = Group(prompt_index=0, prompt_ids=np.arange(0))
    for end, value in ((5, 1.0), (6, 2.0)):
        episode = make_episode(("a", value), ("b", -value))
        prompt_ids = np.array([1, 2, end])
        response = share_prompt(group, replace(episode, prompt_ids=prompt_ids))
        group.responses.append(response)
    assert group.prompt_ids.tolist() == [1, 2]
    for credit, value in zip(group.center_credit(), (-0.5, 0.5), strict=True):
        assert credit is not None
        np.testing.assert_allclose(credit, [0, value, value, 0, -value, -value, 0])


def test_tokens_of_the_environment_are_told_from_turns_that_do_not_count() -> None:
    """Of four turns the third is not trained on; the last token follows nothing."""
    episode = make_episode(*[("", 1.0)] * 4)
    assert episode.mask is not None
    sampled = episode.mask.copy()
    episode.mask[6:8] = False
    versions = np.where(sampled, 0, -1).astype(np.int32)
    forks = np.array([[11, -2]])
    group = Group(
        prompt_index=0,
        prompt_ids=np.arange(3),
        responses=[replace(episode, weight_versions=versions, forks=forks)],
    )
    [sample] = unscored_samples(group, AlgorithmConfig(options={"echo_coef": 0.05}))
    assert sample.environment_mask is not None
    assert np.flatnonzero(sample.environment_mask).tolist() == [2, 5, 8]


def make_samples(masks: Masks = MASKS, *, poison: float | None = None) -> list[Sample]:
    """Samples with all that an estimator reads; at masked-out tokens it is ``poison``."""
    rng = np.random.default_rng(0)

    def drawn(mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        values = -np.abs(rng.normal(size=mask.size)).astype(np.float32)
        return values if poison is None else np.where(mask, values, np.float32(poison))

    def arrays_of(mask: NDArray[np.bool_]) -> dict[str, Any]:
        return {
            f: drawn(mask)
            for f in (
                "old_log_probs",
                "rollout_log_probs",
                "ref_log_probs",
                "values",
                "sharp_log_probs",
            )
        }

    return [
        Sample(
            prompt_ids=np.arange(3),
            response_ids=np.arange(len(mask)),
            response_mask=np.array(mask),
            **arrays_of(np.array(mask)),
        )
        for mask in masks
    ]


def algorithm_of(estimator: str) -> AlgorithmConfig:
    has_rewards = get_advantage_estimator(estimator).reads_token_rewards
    return AlgorithmConfig(
        adv_estimator=estimator,
        options={"gdpo_rewards": {"right": 1.0}} if estimator == "gdpo" else {},
        old_log_probs="trainer",
        kl_ctrl=KLControlConfig(kl_coef=0.1 if has_rewards else 0.0),
        rollout_correction=RolloutCorrectionConfig(
            rollout_is="token",
            rollout_is_batch_normalize=True,
            rollout_rs="token_k2",
            rollout_rs_threshold=0.5,
        ),
    )


@pytest.mark.parametrize("estimator", ESTIMATORS.names)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_out_tokens_are_never_read(estimator: str, poison: float) -> None:
    algorithm = algorithm_of(estimator)
    clean, metrics = prepared(algorithm, make_samples(), [1.0, 0.0, 0.5])
    dirty, found = prepared(algorithm, make_samples(poison=poison), [1.0, 0.0, 0.5])
    assert found == metrics
    assert all(np.isfinite(list(metrics.values())))
    for one, other in zip(clean, dirty, strict=True):
        for field in ("response_mask", "advantages", "returns", "rollout_is_weights"):
            np.testing.assert_array_equal(getattr(one, field), getattr(other, field))


def test_gdpo_reads_the_parts_of_the_reward() -> None:
    """The part is the score in `prepared`, and a whitened one has the mean 0 and the deviation 1."""
    gdpo = AlgorithmConfig(adv_estimator="gdpo", options={"gdpo_rewards": {"right": 1.0}})
    samples, _ = prepared(gdpo, make_samples(), [1.0, 0.0, 0.5])
    advantages = [np.asarray(s.advantages)[s.mask] for s in samples]
    counted = np.concatenate(advantages)
    assert counted.mean() == pytest.approx(0, abs=1e-6)
    assert counted.std(ddof=1) == pytest.approx(1, abs=1e-5)
    assert advantages[0].max() > 0 > advantages[1].min()
    unknown = replace(gdpo, options={"gdpo_rewards": {"short": 1.0}})
    with pytest.raises(BatchError, match=r"^parts is {'right': 1.0}; expected a part 'short'"):
        prepared(unknown, make_samples(), [1.0, 0.0, 0.5])


@pytest.mark.parametrize("field", ["old_log_probs", "rollout_log_probs", "ref_log_probs", "values"])
def test_what_is_not_finite_is_named(field: str) -> None:
    samples = make_samples()
    values = getattr(samples[1], field).copy()
    values[2] = np.nan
    samples[1] = replace(samples[1], **{field: values})
    with pytest.raises(
        BatchError,
        match=rf"^response 1 to prompt 7\.{field}\[2\] is nan; expected a finite float32",
    ):
        prepared(algorithm_of("grpo"), samples, [1.0, 0.0, 0.5])


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
@pytest.mark.parametrize("kl_coef", [0.0, 1e-9])
def test_a_score_counts_where_a_response_ends_in_tokens_of_others(
    estimator: str, kl_coef: float
) -> None:
    """The estimators along tokens read no reward of a masked-out token: the score is on the last one that counts."""
    algorithm = AlgorithmConfig(adv_estimator=estimator, kl_ctrl=KLControlConfig(kl_coef=kl_coef))
    masks = [[True, True, False], [True, True, True]]
    high, _ = prepared(algorithm, make_samples(masks), [1.0, 0.0])
    low, _ = prepared(algorithm, make_samples(masks), [-1.0, 0.0])
    assert high[0].advantages is not None
    assert low[0].advantages is not None
    assert high[0].advantages[1] > low[0].advantages[1]


def test_a_response_without_a_token_has_no_part_in_the_divergence() -> None:
    """verl takes its divergence to be 0, and counts it in the mean and in the controller's steps."""
    control = KLControlConfig(kl_coef=0.1)
    algorithm = AlgorithmConfig(adv_estimator="reinforce_plus_plus", kl_ctrl=control)
    _, metrics = prepared(algorithm, make_samples(MASKS), [1.0, 0.0, 0.5])
    _, without = prepared(algorithm, make_samples(MASKS[:2]), [1.0, 0.0])
    assert metrics["actor/reward_kl_penalty"] == without["actor/reward_kl_penalty"] != 0


def test_responses_are_compared_with_their_batch() -> None:
    """FlashREINFORCE: A = R less the mean of R over all responses, of two controllers and of one to a prompt."""
    scores = [1.0, 0.0, 2.0, 5.0]
    groups = [
        Group(
            prompt_index=i,
            prompt_ids=np.arange(3),
            responses=[replace(make_episode(("", 0.0)), score=score, credit=None, agents={})],
        )
        for i, score in enumerate(scores)
    ]
    algorithm = AlgorithmConfig(adv_estimator="flash_reinforce")
    advantages, _ = prepare_groups(groups, algorithm, {})
    written = [array[:2].tolist() for array in advantages]
    assert written == [[-1.0] * 2, [-2.0] * 2, [0.0] * 2, [3.0] * 2]


def test_roles_have_moving_baselines() -> None:
    """RAE: b <- 0.9 b + 0.1 R of each role in its game, by prompt and episode, and A = R - b with b before R.

    The groups of two controllers come in another order than their prompts, and baselines of one batch are used by the
    next.
    """
    games = {3: "chess", 1: "go", 2: "chess", 0: "chess"}
    returns = {3: [2.0, 1.0], 1: [5.0, 3.0], 2: [0.0, -1.0], 0: [1.0, 4.0]}
    algorithm = AlgorithmConfig(adv_estimator="rae", options={"ema_decay": 0.9})
    baselines: dict[str, float] = {}
    expected_baselines: dict[str, float] = {}
    for _ in range(2):
        groups: list[Group] = []
        for prompt_index, game in games.items():
            # One gains what the other loses, in two turns each.
            episodes = [
                replace(make_episode(("a", r), ("b", -r), ("a", r)), index=i)
                for i, r in enumerate(returns[prompt_index])
            ]
            columns = {"data_source": game}
            ids = np.arange(3)
            groups.append(
                Group(
                    prompt_index=prompt_index, prompt_ids=ids, responses=episodes, columns=columns
                )
            )
        advantages, _ = prepare_groups(groups, algorithm, baselines)
        expected: dict[int, list[list[float]]] = {}
        for prompt_index in range(4):
            for value in returns[prompt_index]:
                row: dict[str, float] = {}
                for role, gain in (("a", value), ("b", -value)):
                    name = f"{games[prompt_index]}/{role}"
                    earlier = expected_baselines.get(name, 0.0)
                    row[role] = gain - earlier
                    expected_baselines[name] = 0.9 * earlier + 0.1 * gain
                tokens = [row["a"]] * 2 + [0] + [row["b"]] * 2 + [0] + [row["a"]] * 2 + [0]
                expected.setdefault(prompt_index, []).append(tokens)
        in_order = [tokens for prompt_index in games for tokens in expected[prompt_index]]
        np.testing.assert_allclose(advantages, in_order, atol=1e-6)
        assert baselines == pytest.approx(expected_baselines)
    assert set(baselines) == {"chess/a", "chess/b", "go/a", "go/b"}
