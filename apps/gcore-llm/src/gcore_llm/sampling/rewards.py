"""The rewards of a run, a reward function, a reward model or both; and held-out evaluation by them."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from gcore_controller import Collectives, InlineCollectives, InlineGroup, StageTimer
from gcore_llm.config import TrainConfig
from gcore_llm.sampling.engines import check_engine, start_engine
from gcore_rollout import (
    ChatEncoder,
    CompositeReward,
    Engine,
    Failed,
    Generation,
    Group,
    HTTPReward,
    JudgeReward,
    PairwiseJudge,
    Prompt,
    ReasoningGymReward,
    RewardFunction,
    RewardRunner,
    RolloutRoles,
    SamplingParams,
    WinnerPattern,
    build_reward,
)
from gcore_runs import build_tokenizer, check_model, eos_token_ids
from gcore_runs.engines import NO_INSTRUMENTATION, Instrumentation
from gcore_runs.errors import UserError

_SEED = 20_250_729
_NUM_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Adds to each response's own score a weighted score against the other responses of its group."""

    runner: RewardRunner
    weight: float

    async def run(self, groups: Sequence[tuple[Group, Prompt]], tokenizer: Any) -> list[Group]:
        """Return the groups with their new scores, without those whose comparison failed and is dropped."""
        tasks = [asyncio.create_task(self._compared(group, prompt, tokenizer)) for group, prompt in groups]
        try:
            return [group for group in await asyncio.gather(*tasks) if group is not None]
        finally:
            for task in tasks:
                task.cancel()

    async def try_on(self, prompt: Prompt) -> None:
        """Compare two empty responses, so that a broken comparison is found before a run starts."""
        await self.runner.score_group(prompt=prompt.text, completions=["", ""], row=prompt.row)

    async def _compared(self, group: Group, prompt: Prompt, tokenizer: Any) -> Group | None:
        texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in group.responses]
        scored = await self.runner.score_group(prompt=prompt.text, completions=texts, row=prompt.row)
        if isinstance(scored, Failed):
            return None
        responses = [
            replace(r, score=r.score + self.weight * one.score, parts={**r.parts, **one.as_parts("model")})
            for r, one in zip(group.responses, scored, strict=True)
        ]
        return replace(group, responses=responses)


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """Scores responses until it is closed; made by `start`."""

    runner: RewardRunner
    comparison: Comparison | None
    """Scores the responses of a group against each other; None: they are not compared."""
    models: AsyncExitStack
    """Frees the models."""

    @classmethod
    async def start(
        cls, config: TrainConfig, *, instrumentation: Instrumentation = NO_INSTRUMENTATION, judge: Engine | None = None
    ) -> Self:
        """Load the rewards that the config names.

        ``judge`` is the engine of a judge's model, to be closed with the rewards; None: it is started here.

        Raises:
            UserError: a bad setting, or a folder that is no such model.
            RewardError: the reward function does not load.
        """
        settings, calls, comparison = config.reward_model, config.reward_calls.runner, None
        async with AsyncExitStack() as models:
            if settings.kind == "none":
                runner = RewardRunner(reward_function(config), calls)
                return cls(runner=runner, comparison=None, models=models.pop_all())
            rewards: dict[str, RewardFunction] = {}
            # First what cannot leave a model behind if it fails.
            if config.reward or config.task.name:
                rewards["function"] = reward_function(config)
            if settings.kind == "server":
                # The runner around it does not retry failures that were retried here.
                rewards["model"] = server = HTTPReward(
                    settings.path, timeout_s=calls.timeout_s, retry=calls.retry, max_connections=calls.max_concurrency
                )
                models.push_async_callback(server.close)
            elif settings.kind == "classifier":
                rewards["model"] = _classifier(config, models)
            else:
                asking = await _judge(config, instrumentation, judge, models)
                if isinstance(asking, PairwiseJudge):
                    comparison = Comparison(runner=RewardRunner(asking, calls), weight=settings.weight)
                else:
                    rewards["model"] = asking
            weights = {name: settings.weight if name == "model" else 1.0 for name in rewards}
            reward = CompositeReward(rewards, weights=weights) if rewards else no_reward
            return cls(runner=RewardRunner(reward, calls), comparison=comparison, models=models.pop_all())

    async def close(self) -> None:
        """Free the models. Idempotent."""
        self.runner.close()
        await self.models.aclose()


def reward_function(config: TrainConfig) -> RewardFunction:
    """Load the reward function that the config names, if it names one; see `TrainConfig.check_inputs`."""
    if config.reward:
        return build_reward(config.reward)
    return ReasoningGymReward(answer_after=config.answer_after) if config.task.name else no_reward


def no_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 0, where only an environment or a comparison rewards."""
    del prompt, completion, row
    return 0.0


def _classifier(config: TrainConfig, models: AsyncExitStack) -> RewardFunction:
    import torch

    from gcore_rollout import SequenceClassifierReward

    path = Path(config.reward_model.path)
    check_model(path, setting="reward_model.path")
    tokenizer = build_tokenizer(path)

    def encode(prompt: str, completion: str) -> Sequence[int]:
        # The prompt is rendered already, and the model has learned to score at the token that ends an answer.
        text = prompt + completion + tokenizer.eos_token
        return tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]

    dtype: torch.dtype = getattr(torch, config.dtype)
    classifier = SequenceClassifierReward.from_pretrained(path, encode=encode, dtype=dtype, device=config.device)
    models.callback(classifier.close)
    return classifier


async def _judge(
    config: TrainConfig, instrumentation: Instrumentation, engine: Engine | None, models: AsyncExitStack
) -> JudgeReward | PairwiseJudge:
    """Start a generative reward model that scores responses one by one, or compares those of a group."""
    judge, path = config.reward_model.judge, Path(config.reward_model.path)
    if judge.pairwise:
        _check_pairwise(config)
        parse = WinnerPattern(pattern=judge.pattern or WinnerPattern.pattern)
        on_unparsable = "drop" if judge.unparsable_score is None else "tie"
        make = partial(PairwiseJudge, parse=parse, on_unparsable=on_unparsable)
    else:
        on_unparsable = "drop" if judge.unparsable_score is None else judge.unparsable_score
        make = partial(JudgeReward, parse=judge.scores(), reduce=judge.reduce, on_unparsable=on_unparsable)
    template = judge.question()
    check_model(path, setting="reward_model.path")
    check_engine(judge, path, setting="reward_model.judge")
    tokenizer = build_tokenizer(path)
    if engine is None:
        eos = eos_token_ids(tokenizer, path)
        engine = await start_engine(judge, config, path, eos, replace(instrumentation, role="judge"))
    models.push_async_callback(engine.close)
    encoder = ChatEncoder(tokenizer)

    def encode(question: str) -> list[int]:
        return encoder.first([{"role": "user", "content": question}])

    return make(
        model=judge.model(engine=engine, encode=encode, decode=encoder.text, seed=config.seed), template=template
    )


def _check_pairwise(config: TrainConfig) -> None:
    algorithm, is_multi_turn = config.algorithm, config.rollout.multi_turn.is_used
    if is_multi_turn:
        raise UserError(
            "reward_model.judge.pairwise is true and rollout.multi_turn makes several turns: one of them is needed, "
            "because one response to one prompt is compared"
        )
    if algorithm.estimator.needs_greedy:
        raise UserError(
            f"reward_model.judge.pairwise is true and algorithm.adv_estimator is {algorithm.adv_estimator!r}: another "
            "estimator is needed, because its greedy response is in no group"
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean scores on the held-out prompts, and some answers."""

    greedy: float
    sampled: float
    samples: list[dict[str, object]]

    def metrics(self) -> dict[str, float]:
        """Return the scores by their names in metrics.jsonl."""
        return {"val/greedy/score/mean": self.greedy, "val/sampled/score/mean": self.sampled}


def sampling_params(config: TrainConfig) -> SamplingParams:
    """Return how a run samples responses."""
    return SamplingParams(max_tokens=config.data.max_response_length, temperature=config.rollout.temperature)


async def evaluate(
    roles: RolloutRoles,
    prompts: Sequence[Prompt],
    config: TrainConfig,
    *,
    group: Collectives | None = None,
    timer: StageTimer | None = None,
) -> Evaluation:
    """Answer every held-out prompt greedily and by sampling once; the result is the same on every controller.

    Answers without a score do not count. With a comparison, the two answers to a prompt are compared with each other.
    Without a group there is one controller.
    """
    group, timer = group or InlineCollectives(InlineGroup(1), 0), timer or StageTimer()
    mine = list(enumerate(prompts))[group.rank :: group.world_size]
    both: list[list[Group]] = []
    sampled = sampling_params(config)
    for sampling in (replace(sampled, temperature=0.0), sampled):
        generation = Generation(roles=roles, sampling=sampling, n=1, seed=_SEED, timer=timer)
        both.append((await generation.run(mine))[0])
    if roles.comparison is not None:
        # Prompts without both answers are left out.
        others = {g.prompt_index: g.responses for g in both[1]}
        pairs = [
            replace(g, responses=g.responses + others[g.prompt_index]) for g in both[0] if g.prompt_index in others
        ]
        with timer.stage("reward"):
            scored = await roles.comparison.run([(p, prompts[p.prompt_index]) for p in pairs], roles.tokenizer)
        both = [[replace(pair, responses=[pair.responses[i]]) for pair in scored] for i in range(2)]
    means: list[float] = []
    for groups in both:
        count = await group.all_reduce(len(groups))
        means.append(await group.all_reduce(sum(g.scores[0] for g in groups)) / max(count, 1))
    shown: list[tuple[int, dict[str, object]]] = []
    for index, response in ((g.prompt_index, g.responses[0]) for g in both[0] if g.prompt_index < _NUM_SHOWN):
        text = roles.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        row: dict[str, object] = {"prompt": prompts[index].text, "completion": text, "score": response.score}
        answer = prompts[index].row.get("answer")
        shown.append((index, row if answer is None else row | {"answer": str(answer)}))
    everyones = [entry for part in await group.all_gather(shown) for entry in part]
    samples = [row for _, row in sorted(everyones, key=lambda entry: entry[0])]
    return Evaluation(greedy=means[0], sampled=means[1], samples=samples)
