"""Engines of a policy or a judge, and the rewards of a run."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from gcore_agents import ChatEncoder, MessageError, render_chat
from gcore_ckpt import load
from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.prompts import PromptSets, longest_sequence, takes_special_tokens
from gcore_llm.sections import RunJudge
from gcore_rollout import (
    CompositeReward,
    Engine,
    EngineReplicas,
    GroupComparison,
    HTTPReward,
    JudgeReward,
    PairwiseJudge,
    Prompt,
    RequestError,
    RewardError,
    RewardFunction,
    RewardRunner,
    RolloutError,
    SamplingParams,
    Scored,
    build_reward,
    build_task_reward,
    check_servers,
    engine_factory as factory_of,
    load_function,
    make_winner_parser,
    visible_gpus,
)
from gcore_runs import UserError, build_tokenizer, check_model, model_folder
from gcore_runs.engines import DRAFT_MODEL, NO_INSTRUMENTATION, Instrumentation, device_options
from gcore_runs.inputs import eos_token_ids
from gcore_runs.settings.sections import EngineConfig


async def start_policy(
    config: TrainConfig,
    model: Path,
    *,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation = NO_INSTRUMENTATION,
) -> Engine:
    """Start the policy's engine, with the weights of a model folder."""
    if config.rollout.is_on_servers:
        await load_servers(config, model, eos_token_ids=eos_token_ids)
    return await start_engine(config.rollout, config, model, eos_token_ids, instrumentation)


async def load_servers(config: TrainConfig, model: Path, *, eos_token_ids: Sequence[int]) -> None:
    """Load the weights of a model folder on the policy's servers, which may have the last ones of another run.

    An engine that connects to them from here on calls these weights version 0.
    """
    engine, _ = await connect_engine(
        config.rollout, config, model, eos_token_ids, Instrumentation()
    )
    try:
        await engine.update_weights(load(model).items(), version=1)
    finally:
        await engine.close()


async def connect_engine(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation,
    rank: int = 0,
    world_size: int = 1,
) -> tuple[Engine, int]:
    """Connect controller ``rank`` to its share of a model's servers; return them as one engine, and their number."""
    weights_dir: str | None = None
    if isinstance(settings, RolloutConfig):
        weights_dir = settings.weights_dir or None
    connect = partial(
        settings.kind.load().connect,
        weights_dir=weights_dir,
        model_path=model,
        max_num_seqs=config.rollout.planned_num_seqs,
        eos_token_ids=eos_token_ids,
    )
    servers = [await asyncio.to_thread(connect, url) for url in settings.urls[rank::world_size]]
    numbers = range(rank, len(settings.urls), world_size)
    engines = list(map(instrumentation.instrument, servers, numbers))
    if len(engines) > 1:
        return EngineReplicas(engines, announce=instrumentation.announce), len(engines)
    return engines[0], 1


def check_engine(
    settings: EngineConfig, model: Path, *, setting: str, max_length: int | None = None
) -> None:
    """Import an engine of the user's own, or ask every server which model it runs; see `check_servers`.

    ``setting`` is the name of the settings, ``max_length`` that of prompt and response together in tokens. It is a
    `RewardError` if there is no such function, and a `UserError` if a server does not answer, or does not fit.
    """
    if settings.kind.is_own:
        load_function(settings.engine, setting=f"{setting}.engine")
    lengths = "data.max_prompt_length + data.max_response_length"
    try:
        check_servers(
            settings.engine, settings.urls, model, max_length=max_length, length_settings=lengths
        )
    except RequestError as error:
        raise UserError(f"{setting}.{error}") from error
    except RolloutError as error:
        raise UserError(str(error)) from error


def engine_factory(
    settings: EngineConfig, config: TrainConfig, model: Path, *, eos_token_ids: Sequence[int]
) -> Callable[[], Engine]:
    """Return what makes an engine with the weights of a model folder, in this process or, pickled, in another."""
    import torch

    own_options = device_options(settings, config)
    options: dict[str, Any] = {}
    if config.rollout.max_num_seqs or settings.engine != "vllm":
        options["max_num_seqs"] = config.rollout.planned_num_seqs
    if isinstance(settings, RolloutConfig):
        # Prompts that are longer than the model allows were refused before (`check_lengths`).
        max_length = config.data.max_length
        options["max_model_len"] = min(max_length, longest_sequence(model) or max_length)
        if config.actor.router_replay == "R3":
            own_options["return_routed_experts"] = True
        if sampling_params(config).truncates:
            own_options["return_sampling_mask"] = True
    engine_options = dict(settings.engine_options)
    if settings.draft_model:
        draft = model_folder(settings.draft_model, setting=DRAFT_MODEL)
        engine_options["speculative_config"] = {
            **engine_options["speculative_config"],
            "model": str(draft),
        }
    device = config.device
    # A process of its own has a GPU of its own.
    if device.startswith("cuda") and (settings.num_processes > 0 or config.runtime == "ray"):
        device = "cuda"
    return factory_of(
        settings.engine,
        model,
        device=device,
        dtype=getattr(torch, config.dtype),
        eos_token_ids=eos_token_ids,
        engine_options=engine_options,
        own_options=own_options,
        **options,
    )


async def start_engine(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation,
) -> Engine:
    """Connect to the servers of the policy or a judge, or start its engine."""
    if settings.is_on_servers:
        engine, _ = await connect_engine(settings, config, model, eos_token_ids, instrumentation)
        return engine
    num_lent = 0
    if settings is config.rollout:
        num_lent = config.sizes.num_lent
    return await instrumentation.start(
        engine_factory(settings, config, model, eos_token_ids=eos_token_ids),
        settings.num_processes,
        # All that generate share the cores.
        num_threads=max(1, config.threads // max(1, config.sizes.num_engine_places)),
        preload=settings.kind.preload,
        gpus=_gpus(settings, config, num_lent),
        num_lent=num_lent,
    )


def _gpus(settings: EngineConfig, config: TrainConfig, num_lent: int = 0) -> list[str]:
    """Return the GPU of each process of an engine; none for one that has no processes, or is on no GPU.

    The last ``num_lent`` are on those of the training ranks.
    """
    if not settings.num_processes:
        return []
    gpus = visible_gpus(config.device)
    if not gpus:
        return []
    from gcore_llm.learning.device_plan import engine_gpus, training_gpus

    # A judge's come after the policy's and those of judges before it.
    first = 0
    for engine in (config.rollout, *config.judges.values()):
        if engine is settings:
            break
        first += engine.num_processes * engine.tensor_parallel_size
    size = settings.tensor_parallel_size
    count = settings.num_processes * size
    training = training_gpus(config, len(gpus))
    numbers = engine_gpus(len(gpus), count, training, takes_turns=config.takes_turns, first=first)
    numbers += engine_gpus(len(gpus), num_lent * size, training, takes_turns=True)
    names = [gpus[number] for number in numbers]
    return [",".join(names[i : i + size]) for i in range(0, len(names), size)]


@dataclass(frozen=True, kw_only=True)
class TextRewards:
    """Scores responses until it is closed; made by `start`."""

    runner: RewardRunner
    comparison: GroupComparison | None
    """Scores the responses of a group against each other; None: they are not compared."""
    models: AsyncExitStack
    """Frees the models."""
    judges: Sequence[Engine] = ()
    """The engines of judges that were started here."""
    graders: Mapping[str, RewardRunner] = field(default_factory=dict[str, RewardRunner])
    """The rewards that held-out sets have in place of the run's, by the set's name."""

    @classmethod
    async def start(
        cls,
        config: TrainConfig,
        *,
        instrumentation: Instrumentation = NO_INSTRUMENTATION,
        engines: Mapping[str, Engine] | None = None,
    ) -> Self:
        """Load the rewards that the config names; `UserError` or `RewardError` if one does not load.

        ``engines`` are those of judges, by their roles, to be closed with the rewards; others are started here.
        """
        settings = config.reward_model
        calls = config.reward_calls.runner
        comparison: GroupComparison | None = None
        judges: list[Engine] = []
        limits = config.reward_calls.process_limits
        graders = {
            name: RewardRunner(build_reward(spec, process_limits=limits), calls)
            for name, spec in config.set_rewards.items()
        }
        async with AsyncExitStack() as models:
            if not settings.is_used:
                runner = RewardRunner(reward_function(config), calls)
                return cls(runner=runner, comparison=None, models=models.pop_all(), graders=graders)
            rewards: dict[str, RewardFunction] = {}
            weights: dict[str, float] = {}
            # First what cannot leave a model behind if it fails.
            if config.reward or config.task.name:
                rewards["function"] = reward_function(config)
                weights["function"] = 1.0
            if settings.kind in ("server", "classifier"):
                weights["model"] = settings.weight
            if settings.kind == "server":
                # The runner around it does not retry failures that were retried here.
                rewards["model"] = server = HTTPReward(
                    settings.path,
                    timeout_s=calls.timeout_s,
                    retry=calls.retry,
                    max_connections=calls.max_concurrency,
                )
                models.push_async_callback(server.close)
            elif settings.kind == "classifier":
                rewards["model"] = _classifier(config, models)
            for name, judge in settings.all_judges.items():
                running = (engines or {}).get(judge.role)
                reward, engine = await _start_judge(judge, config, instrumentation, running, models)
                if running is None and not judge.settings.is_on_servers:
                    judges.append(engine)
                if isinstance(reward, PairwiseJudge):
                    comparison = GroupComparison(
                        runner=RewardRunner(reward, calls), weight=judge.weight
                    )
                else:
                    rewards[name] = reward
                    weights[name] = judge.weight
            composite = CompositeReward(rewards, weights=weights) if rewards else no_reward
            return cls(
                runner=RewardRunner(composite, calls),
                comparison=comparison,
                models=models.pop_all(),
                judges=judges,
                graders=graders,
            )

    def check_rows(self, prompts: PromptSets) -> None:
        """Raise `UserError` for a prompt in memory whose row its reward cannot score."""
        _check_rows(self.runner, "training prompt", prompts.train)
        _check_rows(self.runner, "held-out prompt", prompts.val)
        for name, held_out in prompts.val_by_name.items():
            _check_rows(self.graders.get(name, self.runner), f"prompt of {name}", held_out)

    async def close(self) -> None:
        """Free the models. Idempotent."""
        for runner in (self.runner, *self.graders.values()):
            runner.close()
        await self.models.aclose()


def _check_rows(runner: RewardRunner, name: str, prompts: Sequence[Prompt]) -> None:
    """Raise `UserError` for a row of a set that the reward cannot score."""
    # Rows that are not in memory are read when they are sampled.
    for prompt in prompts if isinstance(prompts, list) else ():
        try:
            runner.check_row(prompt.row)
        except RewardError as error:
            where = prompt.where or f"the row of the {name} {prompt.text[-200:]!r}"
            raise UserError(f"{where}: {error}") from None


def reward_function(config: TrainConfig) -> RewardFunction:
    """Load the reward function that the config names, if it names one; see `TrainConfig.check_inputs`."""
    limits = config.reward_calls.process_limits
    if config.reward:
        return build_reward(
            config.reward,
            prompt_key=config.data.prompt_key,
            kwargs=config.reward_kwargs,
            process_limits=limits,
        )
    if config.task.name:
        return build_task_reward(config.task.name, answer_after=config.answer_after)
    return no_reward


def no_reward(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Return 0, where only an environment or a comparison rewards."""
    del prompt, completion, row
    return 0.0


def _classifier(config: TrainConfig, models: AsyncExitStack) -> RewardFunction:
    """Load a reward model that classifies responses, or their steps."""
    import torch

    from gcore_rollout import SequenceClassifierReward

    settings = config.reward_model
    path = model_folder(settings.path, setting="reward_model.path")
    check_model(path, setting="reward_model.path", may_be_quantized=True)
    tokenizer = build_tokenizer(path)
    encode = _classifier_encoder(tokenizer, eos_token_ids(tokenizer, path), config.data.prompt_key)
    dtype: torch.dtype = getattr(torch, config.dtype)
    device = config.device
    # Ray shows a controller its own GPU alone.
    if config.runtime == "ray" and device.startswith("cuda"):
        device = "cuda"
    model = SequenceClassifierReward.from_pretrained(
        path,
        dtype=dtype,
        device=device,
        step_separator=settings.step_separator,
        step_end=settings.step_end,
        step_reduction=settings.steps,
    )
    models.callback(model.close)
    has_steps = model.scores_steps or not config.algorithm.estimator.reads_steps
    expected = f"a token classifier with algorithm.adv_estimator {config.algorithm.adv_estimator!r}"
    settings.require("path", has_steps, expected)

    async def classifier(prompt: str, completion: str, row: Mapping[str, Any]) -> float | Scored:
        if model.scores_steps:
            return await model.score_steps(encode(prompt, None, row), completion)
        return await model.score_tokens(encode(prompt, completion, row))

    return classifier


def _classifier_encoder(
    tokenizer: Any, eos: Sequence[int], prompt_key: str
) -> Callable[[str, str | None, Mapping[str, Any]], list[int]]:
    """Return a function from a prompt, a completion and the prompt's row to the tokens that a reward model scores.

    Prompts that the policy's chat template rendered are rendered again, by that of the reward model, which may be of
    another family. The last token is the one that ends an answer; without a completion, the one before an answer.
    """

    def encode(prompt: str, completion: str | None, row: Mapping[str, Any]) -> list[int]:
        messages = row.get(prompt_key)
        if messages is None or messages == prompt:
            adds = takes_special_tokens(prompt, tokenizer)
            text = prompt + (completion or "")
        else:
            adds = False
            text = render(messages, completion)
        token_ids = tokenizer(text, add_special_tokens=adds)["input_ids"]
        return token_ids if completion is None else end(token_ids)

    def render(messages: Any, completion: str | None) -> str:
        if tokenizer.chat_template is None:
            raise RewardError(
                "reward_model.path has no chat template; expected one for prompts that are chat messages"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        is_prompt = completion is None
        if not is_prompt:
            messages = [*messages, {"role": "assistant", "content": completion}]
        try:
            return render_chat(tokenizer, messages, tokenize=False, add_generation_prompt=is_prompt)
        except MessageError as error:
            raise RewardError(f"reward_model.path: {error}") from None

    def end(token_ids: list[int]) -> list[int]:
        """Return the tokens up to the last one that ends an answer, of the template or added."""
        for i in reversed(range(len(token_ids))):
            if token_ids[i] in eos:
                return token_ids[: i + 1]
            if tokenizer.decode(token_ids[i]).strip():
                break
        return [*token_ids, tokenizer.eos_token_id]

    return encode


async def _start_judge(
    judge: RunJudge,
    config: TrainConfig,
    instrumentation: Instrumentation,
    engine: Engine | None,
    models: AsyncExitStack,
) -> tuple[JudgeReward | PairwiseJudge, Engine]:
    """Start a generative reward model that scores responses one by one, or compares those of a group."""
    settings = judge.settings
    path = model_folder(judge.path, setting=judge.path_setting)
    score = settings.unparsable_score
    if settings.method in ("score", "rubric", "steps"):
        separator = config.reward_model.step_separator
        make = partial(
            JudgeReward,
            parse=settings.scores(),
            reduce=settings.reduce,
            on_unparsable="drop" if score is None else score,
            rubric_key="rubric" if settings.method == "rubric" else "",
            step_separator=separator if settings.method == "steps" else "",
            step_reduction=config.reward_model.steps,
        )
    else:
        make = partial(
            PairwiseJudge,
            parse=make_winner_parser(settings.pattern),
            on_unparsable="drop" if score is None else "tie",
            scheme=settings.method,
        )
    template = settings.question()
    check_model(path, setting=judge.path_setting, may_be_quantized=True)
    check_engine(settings, path, setting=judge.section)
    tokenizer = build_tokenizer(path)
    if engine is None:
        eos = eos_token_ids(tokenizer, path)
        engine = await start_engine(
            settings, config, path, eos, replace(instrumentation, role=judge.role)
        )
    models.push_async_callback(engine.close)
    encoder = ChatEncoder(tokenizer)

    def encode(question: str) -> list[int]:
        return encoder.first([{"role": "user", "content": question}])

    model = settings.model(engine=engine, encode=encode, decode=encoder.text, seed=config.seed)
    return make(model=model, template=template), engine


def sampling_params(config: TrainConfig) -> SamplingParams:
    """Return how a run samples responses."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
    )
