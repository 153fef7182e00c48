"""The command `gcore-llm eval`: a model, or a run's policy, on sets of prompts."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from gcore_llm.agents.episodes import check_conversations
from gcore_llm.config import TrainConfig
from gcore_llm.evaluation.args import EvalArgs
from gcore_llm.evaluation.estimators import Answered, Estimate
from gcore_llm.evaluation.evaluate import EvaluationTask, TextEvaluation, ValSet, evaluate, val_sets
from gcore_llm.evaluation.results import Results
from gcore_llm.evaluation.sets import PUBLISHED, val_sources, with_sources
from gcore_llm.modality import SamplingRoles
from gcore_llm.prompts import PromptSets, load_val_files, longest_sequence, val_prompts
from gcore_llm.sampling import TextRewards
from gcore_llm.training import (
    close_episodes,
    finished_policy,
    load_prompts,
    load_run,
    scoring_roles,
)
from gcore_rollout import Group, reward_names
from gcore_runs import (
    Display,
    RunFolder,
    UserError,
    build_tokenizer,
    check_model,
    model_folder,
    print_table,
    resolve,
)
from gcore_runs.settings.resources import is_hub_model

_MAX_TOKENS = 2048
"""Longest response of a model with the capacity for it, unless another is set."""
_ANY_LENGTH = 2**30
"""Tokens that no prompt has."""


def run_eval(args: EvalArgs) -> None:
    """Evaluate, and print a table of the sets; raises as `train`."""
    with Display() as display:
        folder, step, evaluation = asyncio.run(_evaluate(args, display))
    prefix = "" if step is None else f"step {step}: "
    display.console.print(f"{prefix}{evaluation.lines()[0]}", soft_wrap=True)
    rows = [
        _row(name or "held out", estimates) for name, estimates in evaluation.by_set() if estimates
    ]
    print_table(
        "mean ± standard error",
        ["set", "prompts", "n", "greedy", "avg@n", "pass@n", "maj@n"],
        [rows],
    )
    display.console.print(f"results:  {folder / 'results.json'}", soft_wrap=True)


def _row(name: str, estimates: Mapping[str, Estimate]) -> list[str]:
    n = max(int(key.partition("@")[2] or 0) for key in estimates)
    num_prompts = max(estimate.num for estimate in estimates.values())
    cells = [name, str(num_prompts), str(n)]
    keys = ("greedy", f"avg@{n}", f"pass@{n}", f"maj@{n}")
    return cells + [str(estimates.get(key, "")) for key in keys]


async def _evaluate(args: EvalArgs, display: Display) -> tuple[Path, int | None, TextEvaluation]:
    """Return the folder of the results, the step of a run's policy, and the evaluation."""
    run, config = _settings(args)
    tokenizer = build_tokenizer(model_folder(config.model))
    if config.rollout.has_several_turns:
        check_conversations(tokenizer, config.data.chat_template_kwargs)
    prompts = _prompts(args, config, tokenizer)
    config = _set_lengths(config, args, prompts.longest)
    rewards = await TextRewards.start(config)
    try:
        rewards.check_rows(prompts)
        sets = val_sets(prompts, config, rewards.graders)
        for val_set in sets:
            first = val_set.prompts[0]
            runner = val_set.reward or rewards.runner
            await runner.try_on(prompt=first.text, completion="", row=first.row)
        engine, reached = await finished_policy(
            run, config, tokenizer, best=args.checkpoint == "best"
        )
        try:
            step = None if run is None else reached
            identity = _identify(config, sets, step)
            results = Results(_folder(args, run, step, identity), identity, sets, tokenizer)
            # What a comparison of two responses adds to their scores is not kept.
            done = {} if rewards.comparison is not None else results.done
            show = _show_progress(display, sets, done)

            def record(task: EvaluationTask, group: Group) -> None:
                results.add(task, group)
                show(group)

            scoring = scoring_roles(config, tokenizer, rewards)
            try:
                roles = SamplingRoles(policy=engine, **scoring)
                evaluation = await evaluate(roles, sets, done=done, finished=record)
            finally:
                await close_episodes(scoring)
        finally:
            await engine.close()
    finally:
        await rewards.close()
    results.write(evaluation)
    return results.folder, step, evaluation


def _settings(args: EvalArgs) -> tuple[RunFolder | None, TrainConfig]:
    """Return the run, if it is one, and the settings of the evaluation but for the lengths."""
    path = Path(args.model)
    run = None
    if (path / "config.toml").is_file():
        run, config = load_run(path)
        if args.on:
            config = _replace_sets(config, args.on)
    else:
        if not path.exists():
            runs = ", ".join(sorted(file.parent.name for file in path.parent.glob("*/config.toml")))
            if runs:
                raise UserError(
                    f"model is {args.model!r}; expected one of the runs in {path.parent}: {runs}"
                )
            if path.parent.name == "runs" or not is_hub_model(args.model):
                raise UserError(
                    f"model is {args.model!r}; expected a run's folder, a model's, or its name on the Hub"
                )
        if not args.on:
            raise UserError(
                f"on is not set; expected files of prompts with a model, or of {', '.join(PUBLISHED)}"
            )
        if args.checkpoint == "best":
            raise UserError(
                "checkpoint is 'best'; expected 'latest' with a model: only a run has several policies"
            )
        config = _replace_sets(TrainConfig(model=args.model), args.on)
        # The engine decides whether they may be quantized; see `finished_policy`.
        check_model(model_folder(config.model), may_be_quantized=True)
    rollout = config.rollout
    sources = val_sources(config.data.val_files, setting="on")
    options: dict[str, Any] = {}
    for name in ("n", "temperature", "top_p", "top_k"):
        value = getattr(args, name)
        if value is not None:
            options[name] = value
    sets: dict[str, Any] = {}
    for source in sources:
        if source.name in rollout.val_kwargs.sets:
            settings = dict(rollout.val_kwargs.sets[source.name])
            # An option is for all sets.
            for name in options:
                settings.pop(name, None)
            sets[source.name] = settings
    num_processes = args.num_processes
    if num_processes is None:
        num_processes = rollout.num_processes
    rollout = replace(
        rollout,
        engine=args.engine or rollout.engine,
        stop=args.stop or rollout.stop,
        num_processes=num_processes,
        val_kwargs=replace(rollout.val_kwargs, **options, sets=sets),
    )
    data = replace(
        config.data,
        prompt_key=args.prompt_key or config.data.prompt_key,
        image_key=args.image_key or config.data.image_key,
        chat_template_kwargs=args.template_kwargs or config.data.chat_template_kwargs,
    )
    config = replace(config, data=data, rollout=rollout, reward=args.reward or config.reward)
    ungraded = [source.path for source in sources if source.name not in config.set_rewards]
    if ungraded and not config.has_reward and not config.task.name:
        raise UserError(
            f"reward is not set; expected PATH.py:function, {', '.join(reward_names())} for {ungraded[0]}"
        )
    return run, config


def _replace_sets(config: TrainConfig, on: Sequence[str]) -> TrainConfig:
    """Return the settings, resolved, with other held-out sets."""
    sets = dict(config.rollout.val_kwargs.sets)
    for name in sets.keys() - {source.name for source in val_sources(on, setting="on")}:
        del sets[name]
    rollout = replace(config.rollout, val_kwargs=replace(config.rollout.val_kwargs, sets=sets))
    data = replace(config.data, val_files=with_sources(on))
    return resolve(replace(config, data=data, rollout=rollout, resume="never"), is_local=True)


def _prompts(args: EvalArgs, config: TrainConfig, tokenizer: Any) -> PromptSets:
    """Return the prompts of the sets, at least one; those of ``--on`` may have any length."""
    if args.on:
        data = replace(config.data, max_prompt_length=_ANY_LENGTH)
        prompts = val_prompts(load_val_files(data, tokenizer, fits=0, setting="on"), data)
    else:
        prompts = load_prompts(config, tokenizer)
    if args.limit:
        val_by_name = {
            name: set_prompts[: args.limit] for name, set_prompts in prompts.val_by_name.items()
        }
        prompts = replace(prompts, val=prompts.val[: args.limit], val_by_name=val_by_name)
    if not prompts.num_held_out:
        reason = "it was trained with data.val_size=0 and no data.val_files"
        raise UserError(f"{args.model} has no held-out prompts: {reason}")
    return prompts


def _set_lengths(config: TrainConfig, args: EvalArgs, longest: int) -> TrainConfig:
    """Return the settings with lengths for prompts of up to ``longest`` tokens; `UserError` if the model has fewer."""
    limit = longest_sequence(model_folder(config.model))
    capacity = _MAX_TOKENS if limit is None else limit - longest
    max_tokens = args.max_tokens
    if not max_tokens and (Path(args.model) / "config.toml").is_file():
        max_tokens = config.data.max_response_length
    elif not max_tokens:
        max_tokens = min(_MAX_TOKENS, capacity)
    if limit is not None and not 0 < max_tokens <= capacity:
        reason = f"the longest prompt has {longest} tokens, and the model takes {limit} together"
        raise UserError(f"max_tokens is {max_tokens}; expected 1 to {capacity}: {reason}")
    max_prompt_length = max(longest, config.data.max_prompt_length)
    data = replace(config.data, max_response_length=max_tokens, max_prompt_length=max_prompt_length)
    longest_sample = data.max_length + data.max_response_length
    actor = replace(
        config.actor, ppo_max_token_len=max(config.actor.ppo_max_token_len, longest_sample)
    )
    return replace(config, data=data, actor=actor)


def _identify(config: TrainConfig, sets: Sequence[ValSet], step: int | None) -> dict[str, Any]:
    """Return what determines the results, as JSON."""
    folder = model_folder(config.model).resolve()
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin"))
    set_identities: list[dict[str, Any]] = []
    for val_set in sets:
        prompts = repr([(p.text, dict(p.row)) for p in val_set.prompts])
        set_identities.append(
            {
                "name": val_set.name,
                "n": val_set.n,
                "temperature": val_set.sampling.temperature,
                "top_p": val_set.sampling.top_p,
                "top_k": val_set.sampling.top_k,
                "stop": list(val_set.sampling.stop),
                "right_from": val_set.right_from,
                "reward": config.set_rewards.get(val_set.name, ""),
                "prompts": sha256(prompts.encode()).hexdigest(),
            }
        )
    return {
        "model": str(folder),
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "step": step,
        "engine": config.rollout.engine,
        "max_tokens": config.data.max_response_length,
        "reward": [config.reward, config.reward_model.path],
        "sets": set_identities,
    }


def _folder(
    args: EvalArgs, run: RunFolder | None, step: int | None, identity: Mapping[str, Any]
) -> Path:
    if args.out:
        return Path(args.out)
    digest = sha256(repr(identity).encode()).hexdigest()[:8]
    if run is None:
        return Path("evaluations", f"{Path(args.model).name}-{digest}")
    return run.path / "evaluations" / f"step-{step}-{digest}"


def _show_progress(
    display: Display, sets: Sequence[ValSet], done: Mapping[EvaluationTask, Answered]
) -> Callable[[Group], None]:
    """Show how many responses are scored; return what counts those to a further prompt, and shows their mean score."""
    total = 0
    for val_set in sets:
        total += len(val_set.prompts) * sum(val_set.num_responses.values())
    num = sum(len(answered.scores) for answered in done.values())
    score = sum(sum(answered.scores) for answered in done.values())
    if num:
        display.say(f"continuing after {num:,} of {total:,} responses")
    display.phase("evaluating", total=total, done=num)

    def add(group: Group) -> None:
        nonlocal num, score
        num += len(group.scores)
        score += sum(group.scores)
        cells = [("mean score", f"{score / num:.3f}"), ("left", f"{total - num:,}")]
        display.show_progress(num, cells, unit="response")

    return add
