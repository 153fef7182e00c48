"""The rewards of a run: a reward function, a reward model, or both."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from gcore_llm.config import TrainConfig
from gcore_llm.sampling.comparison import Comparison
from gcore_llm.sampling.engines import check_engine, start_judge
from gcore_rollout import (
    ChatEncoder,
    CompositeReward,
    Engine,
    GroupRewardRunner,
    HTTPReward,
    JudgeModel,
    JudgeReward,
    PairwiseJudge,
    ReasoningGymReward,
    RewardFunction,
    RewardRunner,
    ScorePattern,
    WinnerPattern,
    build_reward,
    reward_names,
)
from gcore_runs import build_tokenizer, check_model, eos_token_ids
from gcore_runs.engines import NO_INSTRUMENTATION, Instrumentation
from gcore_runs.errors import UserError


class Rewards:
    """Scores responses through `runner` until it is closed; made by `start`.

    Attributes:
        comparison: Scores the responses of a group against each other; None: they are not compared.
    """

    def __init__(
        self, reward: RewardFunction, config: TrainConfig, *, comparison: Comparison | None, models: AsyncExitStack
    ) -> None:
        self.runner = RewardRunner(reward, config.reward_calls.runner)
        self.comparison = comparison
        self._models = models

    @classmethod
    async def start(
        cls, config: TrainConfig, *, instrumentation: Instrumentation = NO_INSTRUMENTATION, judge: Engine | None = None
    ) -> Self:
        """Load the rewards that the config names.

        Args:
            config: of the run.
            instrumentation: of a judge's replicas.
            judge: the engine of a judge's model, to be closed with the rewards; None: it is started here.

        Raises:
            UserError: a bad setting, or a folder that is no such model.
            RewardError: the reward function does not load.
        """
        settings, comparison = config.reward_model, None
        async with AsyncExitStack() as models:
            if settings.kind == "none":
                return cls(reward_function(config), config, comparison=None, models=models.pop_all())
            rewards: dict[str, RewardFunction] = {}
            # First what cannot leave a model behind if it fails.
            if config.reward or config.task.name:
                rewards["function"] = reward_function(config)
            if settings.kind == "server":
                # The runner around it does not retry failures that were retried here.
                calls = config.reward_calls.runner
                rewards["model"] = server = HTTPReward(
                    settings.path, timeout_s=calls.timeout_s, retry=calls.retry, max_connections=calls.max_concurrency
                )
                models.push_async_callback(server.close)
            elif settings.kind == "classifier":
                rewards["model"] = _classifier(config, models)
            else:
                asking = await _judge(config, instrumentation, judge, models)
                if isinstance(asking, PairwiseJudge):
                    runner = GroupRewardRunner(asking, config.reward_calls.runner)
                    comparison = Comparison(runner=runner, weight=settings.weight)
                else:
                    rewards["model"] = asking
            weights = {name: settings.weight if name == "model" else 1.0 for name in rewards}
            reward = CompositeReward(rewards, weights=weights) if rewards else no_reward
            return cls(reward, config, comparison=comparison, models=models.pop_all())

    async def close(self) -> None:
        """Free the models. Idempotent."""
        self.runner.close()
        await self._models.aclose()


def reward_function(config: TrainConfig) -> RewardFunction:
    """Load the reward function that the config names.

    Raises:
        UserError: none is named.
        RewardError: it does not load.
    """
    if config.reward:
        return build_reward(config.reward)
    if config.task.name:
        return ReasoningGymReward(answer_after=config.answer_after)
    if config.rollout.multi_turn.environment:
        return no_reward
    raise UserError(
        f"reward is not set: PATH.py:function, {' or '.join(reward_names())} is needed with data.train_files, "
        "or a reward_model, or an environment that rewards"
    )


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
    template = judge.question(setting="reward_model.judge.template")
    if judge.pairwise:
        _check_pairwise(config)
        make = partial(
            PairwiseJudge,
            parse=WinnerPattern(pattern=judge.pattern or WinnerPattern.pattern),
            on_unparsable="drop" if judge.unparsable_score is None else "tie",
        )
    else:
        make = partial(
            JudgeReward,
            parse=ScorePattern.with_options(judge),
            reduce=judge.reduce,
            on_unparsable="drop" if judge.unparsable_score is None else judge.unparsable_score,
        )
    check_model(path, setting="reward_model.path")
    check_engine(judge, path, setting="reward_model.judge")
    tokenizer = build_tokenizer(path)
    if engine is None:
        eos = eos_token_ids(tokenizer, path)
        engine = await start_judge(config, path, eos_token_ids=eos, instrumentation=instrumentation)
    models.push_async_callback(engine.close)
    encoder = ChatEncoder(tokenizer)
    model = JudgeModel.with_options(
        judge,
        engine=engine,
        encode=lambda question: encoder.first([{"role": "user", "content": question}]),
        decode=encoder.text,
        seed=config.seed,
    )
    return make(model=model, template=template)


def _check_pairwise(config: TrainConfig) -> None:
    multi_turn, algorithm = config.rollout.multi_turn, config.algorithm
    if multi_turn.environment or multi_turn.max_revisions:
        raise UserError(
            "reward_model.judge.pairwise is true and rollout.multi_turn makes several turns: one of them is needed, "
            "because one response to one prompt is compared"
        )
    if algorithm.estimator.needs_greedy:
        raise UserError(
            f"reward_model.judge.pairwise is true and algorithm.adv_estimator is {algorithm.adv_estimator!r}: another "
            "estimator is needed, because its greedy response is in no group"
        )
