"""What scores a run's responses: a reward function, a reward model, or both."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from gcore_llm.config import TrainConfig
from gcore_llm.errors import UserError
from gcore_llm.reward_config import JudgeConfig
from gcore_llm.roles import build_tokenizer, check_model, eos_token_ids
from gcore_rollout import Engine, SamplingParams
from gcore_rollout.multi_turn import ChatEncoder
from gcore_rollout.rewards import (
    CodeReward,
    CompositeReward,
    HTTPReward,
    JudgeModel,
    JudgeReward,
    MathVerifyReward,
    ReasoningGymReward,
    RetryPolicy,
    RewardFunction,
    RewardRunner,
    RewardRunnerConfig,
    ScorePattern,
    load_reward,
)
from gcore_rollout.sandbox import Sandbox

_QUESTION = """Here are a request and an answer to it.

Request:
{prompt}

Answer:
{completion}

How good is the answer? Think about it briefly, then end with "Score: N", where N is a whole number from 0 to 10.
"""


class Rewards:
    """Scores responses through `runner` until it is closed; made by `start`."""

    def __init__(self, reward: RewardFunction, config: TrainConfig, *, close: Callable[[], Awaitable[None]]) -> None:
        self.runner = make_runner(reward, config)
        self._close = close

    @classmethod
    async def start(cls, config: TrainConfig) -> Self:
        """Load what the config names.

        Raises:
            UserError: a bad setting, or a folder that is no such model.
            RewardError: the reward function does not load.
        """
        if config.reward_model.kind == "none":
            return cls(reward_function(config), config, close=_nothing)
        model, close = await _reward_model(config)
        if not config.reward and not config.task.name:
            weight = config.reward_model.weight
            return cls(CompositeReward({"model": model}, weights={"model": weight}), config, close=close)
        rewards = {"function": reward_function(config), "model": model}
        weights = {"function": 1.0, "model": config.reward_model.weight}
        return cls(CompositeReward(rewards, weights=weights), config, close=close)

    async def close(self) -> None:
        """Free the models. Idempotent."""
        self.runner.close()
        close, self._close = self._close, _nothing
        await close()


def make_runner(reward: RewardFunction, config: TrainConfig) -> RewardRunner:
    """What calls a reward as the config says."""
    calls = config.reward_calls
    return RewardRunner(
        reward,
        RewardRunnerConfig(
            max_concurrency=calls.max_concurrency,
            timeout_s=calls.timeout_s,
            retry=RetryPolicy(max_retries=calls.max_retries),
            on_error=calls.on_error,
            sync_in_threads=calls.in_threads,
        ),
    )


def reward_function(config: TrainConfig) -> RewardFunction:
    """The reward function that the config names.

    Raises:
        UserError: none is named.
        RewardError: it does not load.
    """
    if config.task.name and not config.reward:
        return ReasoningGymReward(answer_after=config.answer_after)
    match config.reward:
        case "" if config.rollout.multi_turn.environment:
            return no_reward
        case "":
            raise UserError(
                "reward is not set: PATH.py:function, math-verify or code is needed with data.train_files, "
                "or a reward_model, or an environment that rewards"
            )
        case "math-verify":
            return MathVerifyReward()
        case "code":
            return CodeReward(Sandbox())
        case _:
            return load_reward(config.reward)


async def _reward_model(config: TrainConfig) -> tuple[RewardFunction, Callable[[], Awaitable[None]]]:
    """The model that the config names, and what frees it."""
    path = config.reward_model.path
    if config.reward_model.kind == "server":
        # The runner around it does not retry what this has retried.
        server = HTTPReward(
            path,
            timeout_s=config.reward_calls.timeout_s,
            retry=RetryPolicy(max_retries=config.reward_calls.max_retries),
            max_connections=config.reward_calls.max_concurrency,
        )
        return server, server.close
    check_model(Path(path), setting="reward_model.path")
    if config.reward_model.kind == "classifier":
        import torch

        from gcore_rollout.rewards.sequence_classifier import SequenceClassifierReward

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
    return await _judge(config, config.reward_model.judge, Path(path))


async def _judge(
    config: TrainConfig, judge: JudgeConfig, path: Path
) -> tuple[RewardFunction, Callable[[], Awaitable[None]]]:
    template = _QUESTION
    if judge.template:
        try:
            template = Path(judge.template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"reward_model.judge.template is {judge.template!r}: {error}") from None
    tokenizer = build_tokenizer(path)
    encoder = ChatEncoder(tokenizer)
    engine = await _judge_engine(config, judge, path, tokenizer)
    model = JudgeModel(
        engine=engine,
        encode=lambda question: encoder.first([{"role": "user", "content": question}]),
        decode=encoder.text,
        sampling=SamplingParams(max_tokens=judge.max_response_length, temperature=judge.temperature),
        n=judge.n,
        seed=config.seed,
    )
    reward = JudgeReward(
        model=model,
        template=template,
        parse=ScorePattern(pattern=judge.pattern, low=judge.low, high=judge.high),
        reduce=judge.reduce,
        on_unparsable="drop" if judge.unparsable_score is None else judge.unparsable_score,
    )
    return reward, engine.close


async def _judge_engine(config: TrainConfig, judge: JudgeConfig, path: Path, tokenizer: Any) -> Engine:
    import torch

    options: Mapping[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "max_num_seqs": config.rollout.max_num_seqs,
        "eos_token_ids": eos_token_ids(tokenizer, path),
    }
    if judge.engine == "vllm":
        from gcore_rollout.vllm_engine import VLLMEngine

        make: Callable[[], Engine] = partial(VLLMEngine.from_pretrained, path, **options)
    else:
        from gcore_rollout.hf_engine import HFEngine

        make = partial(HFEngine.from_pretrained, path, device=config.device, **options)
    if not judge.num_processes:
        return make()
    from gcore_rollout.engine_process import PRELOAD_HF, PRELOAD_VLLM, EngineProcess
    from gcore_rollout.replicas import EngineReplicas

    preload = PRELOAD_VLLM if judge.engine == "vllm" else PRELOAD_HF
    return EngineReplicas(
        [
            await EngineProcess.start(make, num_threads=config.threads, preload=preload)
            for _ in range(judge.num_processes)
        ]
    )


def no_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Where the environment rewards."""
    del prompt, completion, row
    return 0.0


async def _nothing() -> None:
    pass
