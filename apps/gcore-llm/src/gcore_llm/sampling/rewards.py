"""The rewards of a run: a reward function, a reward model, or both."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

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
    RetryPolicy,
    RewardFunction,
    RewardRunner,
    RewardRunnerConfig,
    WinnerPattern,
    build_reward,
    reward_names,
)
from gcore_runs import build_tokenizer, check_model, eos_token_ids
from gcore_runs.errors import UserError
from gcore_runs.loop.instrumented_engine import NO_INSTRUMENTATION, Instrumentation

JudgeT = TypeVar("JudgeT")

Close = Callable[[], Awaitable[None]]
"""Frees a model."""

_QUESTION = """Here are a request and an answer to it.

Request:
{prompt}

Answer:
{completion}

How good is the answer? Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""


_COMPARISON = """Here are a request and two answers to it.

Request:
{prompt}

Answer A:
{completion_a}

Answer B:
{completion_b}

Which answer is better? Think about it briefly, then end with "Winner: A", "Winner: B" or "Winner: tie".
"""


class Rewards:
    """Scores responses through `runner` until it is closed; made by `start`.

    Attributes:
        comparison: Scores the responses of a group against each other; None: they are not compared.
    """

    def __init__(
        self,
        reward: RewardFunction,
        config: TrainConfig,
        *,
        comparison: Comparison | None = None,
        close: Close,
    ) -> None:
        self.runner = make_runner(reward, config)
        self.comparison = comparison
        self._close = close

    @classmethod
    async def start(
        cls, config: TrainConfig, *, instrumentation: Instrumentation = NO_INSTRUMENTATION, judge: Engine | None = None
    ) -> Self:
        """Load the rewards that the config names.

        Args:
            config: of the run.
            watched: instrumentation of a judge's replicas.
            judge: the engine of a judge's model, to be closed with the rewards; None: it is started here.

        Raises:
            UserError: a bad setting, or a folder that is no such model.
            RewardError: the reward function does not load.
        """
        settings = config.reward_model
        if settings.kind not in _MODELS:
            return cls(reward_function(config), config, close=_nothing)
        # First what cannot leave a model behind if it fails.
        has_function = bool(config.reward or config.task.name)
        rewards = {"function": reward_function(config)} if has_function else {}
        weights = {"function": 1.0} if has_function else {}
        if settings.is_pairwise:
            compare, close = await _pairwise_judge(config, instrumentation, judge)
            comparison = Comparison(GroupRewardRunner(compare, _runner_config(config)), weight=settings.weight)
            alone = CompositeReward(rewards, weights=weights) if has_function else no_reward
            return cls(alone, config, comparison=comparison, close=close)
        model, close = await _MODELS[settings.kind](config, instrumentation, judge)
        rewards["model"], weights["model"] = model, settings.weight
        return cls(CompositeReward(rewards, weights=weights), config, close=close)

    async def close(self) -> None:
        """Free the models. Idempotent."""
        self.runner.close()
        close, self._close = self._close, _nothing
        await close()


def make_runner(reward: RewardFunction, config: TrainConfig) -> RewardRunner:
    """Return the runner that calls a reward by the settings of a run."""
    return RewardRunner(reward, _runner_config(config))


def _runner_config(config: TrainConfig) -> RewardRunnerConfig:
    calls = config.reward_calls
    return RewardRunnerConfig(
        max_concurrency=calls.max_concurrency,
        timeout_s=calls.timeout_s,
        retry=RetryPolicy(max_retries=calls.max_retries),
        on_error=calls.on_error,
        sync_in_threads=calls.in_threads,
    )


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


async def _server(
    config: TrainConfig, instrumentation: Instrumentation, judge: Engine | None
) -> tuple[RewardFunction, Close]:
    """Return a reward from a server."""
    del instrumentation, judge
    # The runner around it does not retry failures that were retried here.
    server = HTTPReward(
        config.reward_model.path,
        timeout_s=config.reward_calls.timeout_s,
        retry=RetryPolicy(max_retries=config.reward_calls.max_retries),
        max_connections=config.reward_calls.max_concurrency,
    )
    return server, server.close


async def _classifier(
    config: TrainConfig, instrumentation: Instrumentation, judge: Engine | None
) -> tuple[RewardFunction, Close]:
    """Load a sequence classifier."""
    del instrumentation, judge
    import torch

    from gcore_rollout import SequenceClassifierReward

    path = config.reward_model.path
    check_model(Path(path), setting="reward_model.path")
    dtype: torch.dtype = getattr(torch, config.dtype)
    tokenizer = build_tokenizer(Path(path))

    def encode(prompt: str, completion: str) -> Sequence[int]:
        # The prompt is rendered already, and the model has learned to score at the token that ends an answer.
        text = prompt + completion + tokenizer.eos_token
        return tokenizer(text, add_special_tokens=tokenizer.chat_template is None)["input_ids"]

    classifier = SequenceClassifierReward.from_pretrained(path, encode=encode, dtype=dtype, device=config.device)

    async def close() -> None:
        classifier.close()

    return classifier, close


async def _judge(
    config: TrainConfig, instrumentation: Instrumentation, engine: Engine | None
) -> tuple[RewardFunction, Close]:
    """Start a generative reward model that scores responses one by one."""
    judge = config.reward_model.judge
    make = partial(
        JudgeReward,
        template=judge.question(_QUESTION, setting="reward_model.judge.template"),
        parse=judge.score_pattern,
        reduce=judge.reduce,
        on_unparsable="drop" if judge.unparsable_score is None else judge.unparsable_score,
    )
    return await _asking(config, make, instrumentation, engine)


_MODELS = {"judge": _judge, "classifier": _classifier, "server": _server}
"""The kinds of reward model."""


async def _pairwise_judge(
    config: TrainConfig, instrumentation: Instrumentation, engine: Engine | None
) -> tuple[PairwiseJudge, Close]:
    """Start a generative reward model that compares the responses of a group."""
    _check_pairwise(config)
    judge = config.reward_model.judge
    make = partial(
        PairwiseJudge,
        template=judge.question(_COMPARISON, setting="reward_model.judge.template"),
        parse=WinnerPattern(pattern=judge.pattern or WinnerPattern.pattern),
        on_unparsable="drop" if judge.unparsable_score is None else "tie",
    )
    return await _asking(config, make, instrumentation, engine)


async def _asking(
    config: TrainConfig, make: Callable[..., JudgeT], instrumentation: Instrumentation, engine: Engine | None
) -> tuple[JudgeT, Close]:
    """Make a reward of the judge's model, and return it with what frees the model."""
    judge, path = config.reward_model.judge, Path(config.reward_model.path)
    check_model(path, setting="reward_model.path")
    check_engine(judge, path, setting="reward_model.judge")
    tokenizer = build_tokenizer(path)
    encoder = ChatEncoder(tokenizer)
    if engine is None:
        engine = await start_judge(
            config, path, eos_token_ids=eos_token_ids(tokenizer, path), instrumentation=instrumentation
        )
    model = JudgeModel(
        engine=engine,
        encode=lambda question: encoder.first([{"role": "user", "content": question}]),
        decode=encoder.text,
        sampling=judge.sampling,
        n=judge.n,
        seed=config.seed,
    )
    try:
        return make(model=model), engine.close
    except BaseException:
        await engine.close()
        raise


def _check_pairwise(config: TrainConfig) -> None:
    """Check that responses can be compared as a group.

    Raises:
        UserError: they cannot.
    """
    multi_turn = config.rollout.multi_turn
    if multi_turn.environment or multi_turn.max_revisions:
        raise UserError(
            "reward_model.judge.pairwise is true and rollout.multi_turn makes several turns: one of them is needed, "
            "because one response to one prompt is compared"
        )
    if config.algorithm.adv_estimator == "remax":
        raise UserError(
            "reward_model.judge.pairwise is true and algorithm.adv_estimator is 'remax': another estimator is needed, "
            "because its greedy response is in no group"
        )


def no_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 0, where only an environment or a comparison rewards."""
    del prompt, completion, row
    return 0.0


async def _nothing() -> None:
    pass
