"""From settings to a finished run, in this process or on Ray; and samples and scores of its latest policy."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from gcore_agents import SessionJournal
from gcore_ckpt import Checkpointer, load
from gcore_controller import Backend, Context, DeviceTimers
from gcore_llm.agents.episodes import check_conversations, make_episodes
from gcore_llm.config import TrainConfig
from gcore_llm.data.large_prompts import Progress, no_progress
from gcore_llm.data.tasks import load_task, require_worked_examples
from gcore_llm.evaluation.sets import with_sources
from gcore_llm.learning.preparation import has_routers, sample_flops, workload_of
from gcore_llm.learning.teacher_prompts import check_columns
from gcore_llm.learning.trainer_worker import check_libraries, ray_trainer_spec, start_trainer
from gcore_llm.modality import LLMJob, Roles, RunRecorder, SamplingRoles
from gcore_llm.prompts import (
    Problem,
    PromptSets,
    add_images,
    check_lengths,
    load_files,
    make_prompts,
    model_limits,
)
from gcore_llm.report import KINDS
from gcore_llm.sampling import (
    TextRewards,
    check_engine,
    connect_engine,
    engine_factory,
    load_servers,
    sampling_params,
    start_policy,
)
from gcore_llm.sections import WarmupConfig, drop_other_export
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import (
    Engine,
    EngineModelError,
    EpisodeRole,
    Request,
    RewardError,
    VisionProcessor,
)
from gcore_runs import (
    Display,
    RunFolder,
    RunResult,
    Supervisor,
    UserError,
    build_tokenizer,
    check_model,
    model_folder,
    resolve,
    start_inline_backend,
    with_adapter,
)
from gcore_runs.engines import DRAFT_MODEL, Instrumentation, device_timers
from gcore_runs.inputs import count_parameters, eos_token_ids, max_sequence_length
from gcore_runs.loop.best import best_step
from gcore_runs.settings.sections import EngineConfig
from gcore_trainer import merge_lora, read_adapters

if TYPE_CHECKING:
    from gcore_controller import Handles, Recorder
    from gcore_runs.on_ray import ControllerServices, EngineFactory


_WARMUP = WarmupConfig()
ConfigT = TypeVar("ConfigT", bound=TrainConfig)


def train(
    config: TrainConfig, display: Display | None = None, *, warmup: WarmupConfig = _WARMUP
) -> RunResult:
    """Train a policy by reinforcement learning, or resume the run of this name.

    Without a display, `logging` gets what it would show. A new run of the embedded model starts with ``warmup``.

    Raises:
        UserError: wrong settings or data, found before anything is written.
        KeyboardInterrupt: after a checkpoint of the last finished step.
    """
    config = resolve_inputs(config)
    config.check_inputs()
    if config.runtime == "inline":
        # On Ray the ranks do so: this machine may have no libraries for training.
        check_libraries(config)
    with Supervisor(config, app="gcore-llm", display=display) as supervisor:
        say = supervisor.display.say
        tokenizer = _checked_tokenizer(config)
        prompts = load_prompts(config, tokenizer, progress=supervisor.display.show_count)
        check_lengths(config, prompts)
        if config.distillation.prompt:
            check_columns(config, prompts.train)
        config = config.over_rows(len(prompts.train))
        supervisor.take_length(config)
        if config.device.startswith("cuda"):
            from gcore_llm.learning.device_plan import plan_run

            # Before anything is loaded: a run that does not fit is refused here.
            config = plan_run(config, say)
        instrumentation = Instrumentation(devices=device_timers(config), announce=say)
        with supervisor.run_services(
            TextRewards.start(config, instrumentation=instrumentation)
        ) as rewards:
            say(
                f"trying the reward on an empty response, for at most {config.reward_calls.timeout_s:g} s"
            )
            supervisor.run_async(_try_rewards(rewards, prompts, say))
            scoring = scoring_roles(config, tokenizer, rewards)
            notices = [
                f"{len(prompts.train):,} training prompts, {prompts.num_held_out:,} held out"
            ]
            if prompts.num_too_long:
                longest = config.data.max_prompt_length
                notices.insert(
                    0, f"left out {prompts.num_too_long} prompts longer than {longest} tokens"
                )
            run = supervisor.open_run(*notices)
            if not config.model and not run.model.is_dir():
                from gcore_llm.finetune.warmup import make_warm_model

                making = make_warm_model(
                    config,
                    run,
                    prompts,
                    tokenizer,
                    rewards.runner,
                    supervisor.display,
                    warmup=warmup,
                    episodes=scoring["episodes"] if config.rollout.agent.run else None,
                )
                supervisor.run_async(making)
                supervisor.run_async(close_episodes(scoring))
            drop_other_export(run.export, config.actor)
            if supervisor.resume(config.trainer.total_training_steps) is not None:
                model = model_folder(config.model) if config.model else run.model
                if config.runtime == "ray":
                    starting = _start_on_ray(config, model, run, tokenizer, rewards, say)
                else:
                    logged = replace(instrumentation, logs=run.logs)
                    scoring = scoring_roles(config, tokenizer, rewards, run=run.path)
                    starting = _start_inline(config, model, run, scoring, rewards.judges, logged)
                with supervisor.run_services(starting) as backend:
                    job = LLMJob(
                        config=config,
                        prompts=prompts,
                        workload=workload_of(model),
                        # Engines start from the model's folder, without adapters.
                        is_policy_behind=bool(config.actor.lora_adapter_path),
                    )
                    supervisor.train(backend, job, RunRecorder)
                    best = supervisor.best_policy()

                    def export(path: Path) -> None:
                        if best is None:
                            backend.learner.save_pretrained(path)
                        else:
                            shutil.copytree(best, path)
                        tokenizer.save_pretrained(path)

                    supervisor.export(export)
        return supervisor.finish(KINDS)


def resolve_inputs(config: ConfigT) -> ConfigT:
    """Return the settings with the sources of published sets, and of this machine; see `resolve`."""
    data = replace(config.data, val_files=with_sources(config.data.val_files))
    resolved = resolve(replace(config, data=data))
    return replace(resolved, actor=with_adapter(resolved.actor))


def load_prompts(
    config: TrainConfig, tokenizer: Any, *, progress: Progress = no_progress
) -> PromptSets:
    """Load the prompts that the config names, from a task or from files; see `load_files`."""
    if config.task.name:
        return load_task(config.task, config.data, tokenizer, seed=config.seed)
    fits = (
        min(model_limits(config).values(), default=config.data.max_length)
        - config.data.max_response_length
    )
    return load_files(
        config.data, tokenizer, seed=config.data.shuffle_seed, fits=fits, progress=progress
    )


def _checked_tokenizer(config: TrainConfig) -> Any:
    """Check the models and engine that the config names, and return the policy's tokenizer."""
    rollout = config.rollout
    model = model_folder(config.model)
    if not config.model and rollout.is_on_servers:
        raise UserError(
            f"model is not set; expected a folder with rollout.engine {rollout.engine!r}"
        )
    critic = config.critic.model if config.algorithm.estimator.needs_critic else ""
    folders = {"model": config.model, "critic.model": critic, DRAFT_MODEL: rollout.draft_model}
    for setting, folder in folders.items():
        if folder:
            check_model(
                model_folder(folder, setting=setting),
                setting=setting,
                may_be_quantized=setting == DRAFT_MODEL,
            )
    if rollout.weights_dir and not Path(rollout.weights_dir).is_dir():
        raise UserError(
            f"rollout.engine_options.weights_dir is {rollout.weights_dir!r}; expected an existing folder"
        )
    if config.runtime == "inline":
        # On a cluster it is a file of the nodes.
        for settings in (rollout, *config.judges.values()):
            settings.check_server_python()
    check_engine(rollout, model, setting="rollout", max_length=config.data.max_length)
    replay = config.actor.router_replay
    if replay != "disabled" and not (config.model and has_routers(model)):
        raise UserError(
            f"actor.router_replay is {replay!r}; expected 'disabled', because the model in {model} has no routers"
        )
    tokenizer = (
        build_tokenizer(model)
        if config.model
        else tiny_tokenizer(chats=bool(config.rollout.agent.run))
    )
    if config.rollout.has_several_turns:
        check_conversations(tokenizer, config.data.chat_template_kwargs)
    check_teachers(config.distillation.teachers, tokenizer, max_length=config.data.max_length)
    if not config.model:
        require_worked_examples(
            config.task.name,
            instead="on which the embedded model is warmed up, or a model of your own for any task: --model FOLDER",
        )
    return tokenizer


async def _try_rewards(
    rewards: TextRewards, prompts: PromptSets, say: Callable[[str], None]
) -> None:
    """Call each reward once, so that a broken one is found before the model is loaded."""
    rewards.check_rows(prompts)
    first = prompts.train[0]
    scored = await rewards.runner.try_on(prompt=first.text, completion="", row=first.row)
    if isinstance(scored, RewardError):
        say(f"warning: the trial gave no score: {scored}")
    if rewards.comparison is not None:
        await rewards.comparison.try_on(first)
    for name, grader in rewards.graders.items():
        for prompt in prompts.val_by_name[name][:1]:
            await grader.try_on(prompt=prompt.text, completion="", row=prompt.row)


def scoring_roles(
    config: TrainConfig, tokenizer: Any, rewards: TextRewards, *, run: Path | None = None
) -> dict[str, Any]:
    """Return the fields of `SamplingRoles` that score, with the episodes that the config names.

    ``run`` is the folder of the run, which keeps finished sessions of agents; None: nothing is kept.
    """
    journal = None
    if run is not None and config.rollout.agent.run:
        max_age = 0
        if config.rollout.partial_rollout or config.trainer.schedule == "async":
            max_age = config.rollout.max_staleness
        journal = SessionJournal(
            run / "sessions", num_steps=config.trainer.save_freq, max_age=max_age
        )
    episodes = make_episodes(
        config.rollout.agent,
        config.rollout.multi_turn,
        tokenizer,
        rewards.runner,
        is_rewarded=bool(config.reward or config.reward_model.is_used or config.task.name),
        prompt_key=config.data.prompt_key,
        max_context=config.data.max_length,
        on_error=config.reward_calls.on_error,
        chat_template_kwargs=config.data.chat_template_kwargs,
        vision=_load_vision(config, tokenizer),
        journal=journal,
    )
    return {
        "reward": rewards.runner,
        "comparison": rewards.comparison,
        "graders": rewards.graders,
        "tokenizer": tokenizer,
        "episodes": episodes,
    }


def _load_vision(config: TrainConfig, tokenizer: Any) -> VisionProcessor | None:
    """Return the policy's image processor for episodes; None: the model sees nothing, or a part of the run does not."""
    if not config.rollout.has_several_turns or config.image_conflicts:
        return None
    try:
        return VisionProcessor.from_pretrained(tokenizer.name_or_path)
    except EngineModelError:
        return None


async def _start_inline(
    config: TrainConfig,
    model: Path,
    run: RunFolder,
    scoring: dict[str, Any],
    judges: Sequence[Engine],
    instrumentation: Instrumentation,
) -> Backend[LLMJob, TrainConfig]:
    """Load the model in a folder for every role that needs it, in this process."""
    devices = instrumentation.devices or DeviceTimers()
    # vLLM sets process-wide state as it starts, so it comes first.
    eos = eos_token_ids(scoring["tokenizer"], model)
    policy = await start_policy(config, model, eos_token_ids=eos, instrumentation=instrumentation)

    async def close() -> None:
        await close_episodes(scoring)
        await policy.close()

    return await start_inline_backend(
        config,
        shared=SamplingRoles(policy=policy, devices=devices, **scoring),
        judges=judges,
        roles=Roles,
        start_trainer=partial(start_trainer, config, model, run.checkpoints),
        close=close,
    )


async def _start_on_ray(
    config: TrainConfig,
    model: Path,
    run: RunFolder,
    tokenizer: Any,
    rewards: TextRewards,
    announce: Callable[[str], None],
) -> Backend[LLMJob, TrainConfig]:
    """Load the model in a folder for every role that needs it, on a cluster."""
    import torch

    from gcore_runs.on_ray import start_ray_backend

    # Each controller starts rewards of its own.
    await rewards.close()
    eos = eos_token_ids(tokenizer, model)
    if config.rollout.is_on_servers:
        await load_servers(config, model, eos_token_ids=eos)
    judges: dict[str, Callable[[TrainConfig], EngineFactory]] = {}
    num_parameters = count_parameters(model)
    for judge in config.reward_model.all_judges.values():
        if judge.role in config.judges:
            path = model_folder(judge.path, setting=judge.path_setting)
            settings = partial(lambda role, config: config.judges[role], judge.role)
            judges[judge.role] = _engines(path, build_tokenizer(path), settings)
            num_parameters += count_parameters(path)
    return await start_ray_backend(
        config,
        engine=_engines(model, tokenizer, lambda config: config.rollout),
        judges=judges,
        trainer_spec=partial(ray_trainer_spec, model=model, checkpoints=run.checkpoints),
        run_controller=partial(_run_controller, tokenizer, run.path.absolute()),
        checkpoints=run.checkpoints,
        announce=announce,
        connect_policy=partial(_connect_policy, model.absolute(), eos),
        weights_bytes=num_parameters * getattr(torch, config.dtype).itemsize,
    )


async def _connect_policy(
    model: Path,
    eos: Sequence[int],
    config: TrainConfig,
    instrumentation: Instrumentation,
    rank: int,
    world_size: int,
) -> tuple[Engine, int]:
    return await connect_engine(
        config.rollout, config, model, eos, instrumentation, rank, world_size
    )


def _engines(
    model: Path, tokenizer: Any, settings: Callable[[TrainConfig], EngineConfig]
) -> "Callable[[TrainConfig], EngineFactory]":
    eos = eos_token_ids(tokenizer, model)
    return lambda config: engine_factory(
        settings(config), config, model.absolute(), eos_token_ids=eos
    )


async def _run_controller(
    tokenizer: Any,
    run: Path,
    job: LLMJob,
    ctx: "Context[Handles]",
    services: "ControllerServices",
    recorder: "Recorder",
) -> None:
    """Build a controller's roles in its process, and run the program with them."""
    config = job.config
    rewards = await TextRewards.start(config, engines=services.judges)
    scoring = scoring_roles(config, tokenizer, rewards, run=run)
    try:
        roles = Roles(
            policy=services.policy,
            **scoring,
            policy_slots=services.num_engines * config.rollout.planned_num_seqs,
            learner=services.connect_trainer(ctx, partial(sample_flops, job.workload)),
            devices=services.devices,
            owns_process=True,
        )
        await job.program(recorder)(ctx.with_roles(roles))
    finally:
        await close_episodes(scoring)
        await rewards.close()


async def close_episodes(scoring: Mapping[str, Any]) -> None:
    """Close the episodes of `scoring_roles`, if there are any."""
    episodes: EpisodeRole | None = scoring["episodes"]
    if episodes is not None and episodes.close is not None:
        await episodes.close()


def load_run(path: Path) -> tuple[RunFolder, TrainConfig]:
    """Return a run's folder, and its settings with the folder of its model; `UserError` if it has none yet."""
    run, config = RunFolder.open_with_config(path, TrainConfig)
    if not config.model and not run.model.is_dir():
        raise UserError(
            f"{path} has no model yet: gcore-llm train is still warming it up, or was stopped before it had"
        )
    if not config.model:
        config = replace(config, model=str(run.model))
    return run, config


async def finished_policy(
    run: RunFolder | None, config: TrainConfig, tokenizer: Any, *, best: bool = False
) -> tuple[Engine, int]:
    """Start an engine with the weights of a run's last checkpoint, or with its best ones; return it, and their step.

    Without a run, and without any checkpoint, they are those that training starts from. `UserError` if a run has kept
    none as its best ones.
    """
    import torch

    torch.set_num_threads(config.threads)
    model = model_folder(config.model)
    check_model(model, may_be_quantized=config.rollout.engine != "hf")
    kept_step = None
    if run is not None and best:
        kept_step = best_step(run)
        if kept_step is None:
            raise UserError(
                f"checkpoint is 'best'; expected 'latest': {run.path} has kept none (trainer.export is 'last')"
            )
    if config.rollout.is_on_servers:
        # The run may be in the middle of a step on them.
        config = replace(
            config, rollout=replace(config.rollout, engine="hf", urls=(), engine_options={})
        )
    engine = await start_policy(config, model, eos_token_ids=eos_token_ids(tokenizer, model))
    lora = config.actor.lora
    step = kept_step or 0
    trained: Mapping[str, Any] = {} if lora is None else read_adapters(lora)
    if run is not None and kept_step is not None:
        folder = run.best / "trained"
        if lora is not None and (folder / "adapter_config.json").is_file():
            trained = read_adapters(replace(lora, path=str(folder)))
        else:
            lora = None
            trained = load(folder)
    elif run is not None:
        checkpointer = Checkpointer(run.checkpoints)
        if checkpointer.steps():
            saved = checkpointer.load(only=["step", "trainer.model"])
            step = saved["step"]
            trained = saved["trainer"]["model"]
    if trained:
        weights = (
            trained.items() if lora is None else merge_lora(load(model).items(), trained, lora)
        )
        await engine.update_weights(weights, version=max(step, 1))
    return engine, step


async def sample_run(
    run: Path,
    prompt: str,
    *,
    images: Sequence[str] = (),
    n: int,
    temperature: float,
    max_tokens: int,
    seed: int,
) -> list[str]:
    """Complete a prompt with image files ``n`` times."""
    folder, config = load_run(run)
    tokenizer = build_tokenizer(model_folder(config.model))
    image_key = config.data.image_key
    row = {image_key: list(images)}
    [ready] = make_prompts([Problem(value=prompt, row=row, where="PROMPT")], tokenizer, config.data)
    if image_key:
        ready = add_images(ready, image_key, tokenizer, Path(), "images")
    elif images:
        raise UserError(f"images is {images!r}; expected none for a run without data.image_key")
    engine, _ = await finished_policy(folder, config, tokenizer)
    request = Request(
        request_id="sample",
        prompt_token_ids=ready.token_ids,
        sampling=replace(
            sampling_params(config),
            max_tokens=max_tokens or config.data.max_response_length,
            temperature=temperature,
        ),
        n=n,
        seed=seed,
        images=() if ready.images is None else ready.images.encoded(),
    )
    completions = [c async for c in engine.generate([request])]
    await engine.close()
    completions.sort(key=lambda c: c.index)
    return [tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]


def check_teachers(teachers: Sequence[str], tokenizer: Any, *, max_length: int) -> None:
    """Raise `UserError` unless each is a model with the policy's tokens, which takes sequences of so many tokens."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    for name in teachers:
        folder = model_folder(name, setting="distillation.teachers")
        check_model(folder, setting="distillation.teachers")
        limit = max_sequence_length(folder)
        if limit is not None and limit < max_length:
            raise UserError(
                f"distillation.teachers holds {name!r}, which takes at most {limit} tokens; expected models that take "
                f"data.max_prompt_length + data.max_response_length = {max_length}"
            )
        teacher_vocabulary: dict[str, int] = build_tokenizer(folder).get_vocab()
        differing = dict(vocabulary.items() ^ teacher_vocabulary.items())
        if differing:
            token = min(differing)
            raise UserError(
                f"distillation.teachers holds {name!r}; expected models with the policy's tokenizer: of "
                f"{len(differing)} tokens that differ, {token!r} is {vocabulary.get(token)} for the policy and "
                f"{teacher_vocabulary.get(token)} for this teacher"
            )
