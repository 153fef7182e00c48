"""The command `gcore-llm eval`: a model, or a run's policy, on sets of prompts."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from gcore_llm.config import TrainConfig
from gcore_llm.evaluation.args import EvalArgs
from gcore_llm.evaluation.estimators import Answered, Estimate
from gcore_llm.evaluation.evaluate import Evaluation, Task, ValSet, evaluate, val_sets
from gcore_llm.evaluation.results import Results
from gcore_llm.evaluation.sets import PUBLISHED, val_sources, with_sources
from gcore_llm.modality import SamplingRoles
from gcore_llm.prompts import PromptSets, load_val_files, longest_sequence, val_prompts
from gcore_llm.sampling import Rewards
from gcore_llm.training import finished_policy, load_prompts, opened_run, scoring_roles
from gcore_rollout import Group, reward_names
from gcore_runs import (
    Display,
    RunFolder,
    UserError,
    build_tokenizer,
    check_model,
    is_hub_model,
    model_folder,
    print_table,
    resolve,
)

_MAX_TOKENS = 2048
"""Longest response of a model with the capacity for it, unless another is set."""
_ANY_LENGTH = 2**30
"""Tokens that no prompt has."""


def run_eval(args: EvalArgs) -> None:
    """Evaluate, and print a table of the sets; raises as `train`."""
    with Display() as display:
        folder, step, evaluation = asyncio.run(_evaluated(args, display))
    where = "" if step is None else f"step {step}: "
    display.console.print(f"{where}{evaluation.lines()[0]}", soft_wrap=True)
    rows = [_row(name or "held out", own) for name, own in evaluation.by_set() if own]
    print_table("mean ± standard error", ["set", "prompts", "n", "greedy", "avg@n", "pass@n", "maj@n"], [rows])
    display.console.print(f"results:  {folder / 'results.json'}", soft_wrap=True)


def _row(name: str, own: Mapping[str, Estimate]) -> list[str]:
    n = max((int(key.partition("@")[2]) for key in own if "@" in key), default=0)
    cells = [str(own[key]) if key in own else "" for key in ("greedy", f"avg@{n}", f"pass@{n}", f"maj@{n}")]
    return [name, str(max(estimate.num for estimate in own.values())), str(n), *cells]


async def _evaluated(args: EvalArgs, display: Display) -> tuple[Path, int | None, Evaluation]:
    """Return the folder of the results, the step of a run's policy, and the evaluation."""
    run, config = _settings(args)
    tokenizer = build_tokenizer(model_folder(config.model))
    prompts = _prompts(args, config, tokenizer)
    config = _with_lengths(config, args, prompts.longest)
    rewards = await Rewards.start(config)
    try:
        rewards.check_rows(prompts)
        sets = val_sets(prompts, config, rewards.graders)
        for own in sets:
            first, runner = own.prompts[0], own.reward or rewards.runner
            await runner.try_on(prompt=first.text, completion="", row=first.row)
        engine, reached = await finished_policy(run, config, tokenizer, best=args.checkpoint == "best")
        try:
            step = None if run is None else reached
            identity = _identity(config, sets, step)
            results = Results(_folder(args, run, step, identity), identity, sets, tokenizer)
            # What a comparison of two responses adds to their scores is not kept.
            done = {} if rewards.comparison is not None else results.done
            bar = _Progress(display, sets, done)

            def finished(task: Task, group: Group) -> None:
                results.add(task, group)
                bar.add(group)

            roles = SamplingRoles(policy=engine, **scoring_roles(config, tokenizer, rewards))
            evaluation = await evaluate(roles, sets, done=done, finished=finished)
        finally:
            await engine.close()
    finally:
        await rewards.close()
    results.write(evaluation)
    return results.folder, step, evaluation


def _settings(args: EvalArgs) -> tuple[RunFolder | None, TrainConfig]:
    """Return the run, if it is one, and the settings of the evaluation but for the lengths."""
    path, run = Path(args.model), None
    if (path / "config.toml").is_file():
        run, config = opened_run(path)
        config = _on(config, args.on) if args.on else config
    else:
        if not path.exists() and any(path.parent.glob("*/config.toml")):
            runs = ", ".join(sorted(file.parent.name for file in path.parent.glob("*/config.toml")))
            raise UserError(f"model is {args.model!r}; expected one of the runs in {path.parent}: {runs}")
        if not path.exists() and (path.parent.name == "runs" or not is_hub_model(args.model)):
            raise UserError(f"model is {args.model!r}; expected a run's folder, a model's, or its name on the Hub")
        if not args.on:
            raise UserError(f"on is not set; expected files of prompts with a model, or of {', '.join(PUBLISHED)}")
        if args.checkpoint == "best":
            raise UserError("checkpoint is 'best'; expected 'latest' with a model: only a run has several policies")
        config = _on(TrainConfig(model=args.model), args.on)
        # The engine decides whether they may be quantized; see `finished_policy`.
        check_model(model_folder(config.model), may_be_quantized=True)
    rollout, own, on = config.rollout, config.rollout.val_kwargs, config.data.val_files
    sources = val_sources(on, setting="on")
    options = {name: getattr(args, name) for name in ("n", "temperature", "top_p", "top_k")}
    given = {name: value for name, value in options.items() if value is not None}
    # An option is for all sets.
    names = own.sets.keys() & {source.name for source in sources}
    sets = {name: {key: value for key, value in own.sets[name].items() if key not in given} for name in names}
    rollout = replace(
        rollout,
        engine=args.engine or rollout.engine,
        stop=args.stop or rollout.stop,
        num_processes=rollout.num_processes if args.num_processes is None else args.num_processes,
        val_kwargs=replace(own, **given, sets=sets),
    )
    data = replace(
        config.data,
        val_files=on,
        prompt_key=args.prompt_key or config.data.prompt_key,
        chat_template_kwargs=args.template_kwargs or config.data.chat_template_kwargs,
    )
    config = replace(config, data=data, rollout=rollout, reward=args.reward or config.reward)
    has_reward = config.reward or config.reward_model.is_used or config.rollout.multi_turn.environment
    ungraded = [source.path for source in sources if source.name not in config.set_rewards]
    if ungraded and not has_reward and not config.task.name:
        raise UserError(f"reward is not set; expected PATH.py:function, {', '.join(reward_names())} for {ungraded[0]}")
    return run, config


def _on(config: TrainConfig, on: Sequence[str]) -> TrainConfig:
    """Return the settings, resolved, with other held-out sets."""
    own, names = config.rollout.val_kwargs, {source.name for source in val_sources(on, setting="on")}
    own = replace(own, sets={name: values for name, values in own.sets.items() if name in names})
    data = replace(config.data, val_files=with_sources(on))
    return resolve(
        replace(config, data=data, rollout=replace(config.rollout, val_kwargs=own), resume="never"), is_local=True
    )


def _prompts(args: EvalArgs, config: TrainConfig, tokenizer: Any) -> PromptSets:
    """Return the prompts of the sets, at least one; those of ``--on`` may have any length."""
    if args.on:
        data = replace(config.data, max_prompt_length=_ANY_LENGTH)
        prompts = val_prompts(load_val_files(data, tokenizer, fits=0, setting="on"), data)
    else:
        prompts = load_prompts(config, tokenizer)
    if args.limit:
        named = {name: own[: args.limit] for name, own in prompts.named.items()}
        prompts = replace(prompts, val=prompts.val[: args.limit], named=named)
    if not prompts.num_held_out:
        reason = "it was trained with data.val_size=0 and no data.val_files"
        raise UserError(f"{args.model} has no held-out prompts: {reason}")
    return prompts


def _with_lengths(config: TrainConfig, args: EvalArgs, longest: int) -> TrainConfig:
    """Return the settings with lengths for prompts of up to ``longest`` tokens; `UserError` if the model has fewer."""
    limit = longest_sequence(model_folder(config.model))
    left = _MAX_TOKENS if limit is None else limit - longest
    is_own = (Path(args.model) / "config.toml").is_file()
    max_tokens = args.max_tokens or (config.data.max_response_length if is_own else min(_MAX_TOKENS, left))
    if limit is not None and not 0 < max_tokens <= left:
        reason = f"the longest prompt has {longest} tokens, and the model takes {limit} together"
        raise UserError(f"max_tokens is {max_tokens}; expected 1 to {left}: {reason}")
    data = replace(
        config.data, max_response_length=max_tokens, max_prompt_length=max(longest, config.data.max_prompt_length)
    )
    actor = replace(config.actor, ppo_max_token_len=max(config.actor.ppo_max_token_len, data.max_length))
    return replace(config, data=data, actor=actor)


def _identity(config: TrainConfig, sets: Sequence[ValSet], step: int | None) -> dict[str, Any]:
    """Return what determines the results, as JSON."""
    folder = model_folder(config.model).resolve()
    weights = [*sorted(folder.glob("*.safetensors")), *sorted(folder.glob("*.bin"))]
    return {
        "model": str(folder),
        "weights": [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights],
        "step": step,
        "engine": config.rollout.engine,
        "max_tokens": config.data.max_response_length,
        "reward": [config.reward, config.reward_model.path],
        "sets": [
            {
                "name": own.name,
                "n": own.n,
                "temperature": own.sampling.temperature,
                "top_p": own.sampling.top_p,
                "top_k": own.sampling.top_k,
                "stop": list(own.sampling.stop),
                "right_from": own.right_from,
                "reward": config.set_rewards.get(own.name, ""),
                "prompts": sha256(repr([(p.text, dict(p.row)) for p in own.prompts]).encode()).hexdigest(),
            }
            for own in sets
        ],
    }


def _folder(args: EvalArgs, run: RunFolder | None, step: int | None, identity: Mapping[str, Any]) -> Path:
    if args.out:
        return Path(args.out)
    parent = Path() if run is None else run.path
    stem = Path(args.model).name if step is None else f"step-{step}"
    return parent / "evaluations" / f"{stem}-{sha256(repr(identity).encode()).hexdigest()[:8]}"


class _Progress:
    """Shows how many responses are scored, and their mean score."""

    def __init__(self, display: Display, sets: Sequence[ValSet], done: Mapping[Task, Answered]) -> None:
        self._display = display
        self._total = sum(len(own.prompts) * sum(own.num_responses.values()) for own in sets)
        scores = [score for one in done.values() for score in one.scores]
        self._num, self._sum = len(scores), sum(scores)
        if scores:
            display.say(f"continuing after {self._num:,} of {self._total:,} responses")
        display.phase("evaluating", total=self._total, done=self._num)

    def add(self, group: Group) -> None:
        """Count the responses to a prompt."""
        self._num, self._sum = self._num + len(group.scores), self._sum + sum(group.scores)
        cells = [("mean score", f"{self._sum / self._num:.3f}"), ("left", f"{self._total - self._num:,}")]
        self._display.show_progress(self._num, cells, unit="response")
