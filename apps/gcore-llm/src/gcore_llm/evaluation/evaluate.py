"""Evaluation on sets of prompts, by all controllers and engines at once."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from gcore_controller import Collectives, InlineCollectives, StageTimer
from gcore_llm.config import TrainConfig
from gcore_llm.evaluation.estimators import Answered, Estimate, estimates
from gcore_llm.prompts import PromptSets
from gcore_llm.sampling import sampling_params
from gcore_rollout import Generation, Group, Prompt, RewardRunner, RolloutRoles, SamplingParams

Way = Literal["greedy", "sampled"]
"""How responses are generated."""

_SEED = 20_250_729
_NUM_SHOWN = 16
_SOURCE = "data_source"
"""Column of a row by which the scores are divided."""


@dataclass(frozen=True, kw_only=True)
class ValSet:
    """A set of prompts, and how responses to them are sampled and scored."""

    name: str = ""
    """Its name in metrics; empty: the only set without one."""
    prompts: Sequence[Prompt]
    sampling: SamplingParams
    n: int
    """Sampled responses to each prompt; 0: there are greedy ones alone."""
    reward: RewardRunner | None = None
    """None: the run's own."""
    right_from: float = 1.0
    """Lowest score that pass@k counts as right."""

    @property
    def num_responses(self) -> dict[Way, int]:
        """Responses to each prompt by the way that they are generated."""
        if self.n == 0:
            return {"greedy": 1}
        return {"greedy": 1, "sampled": self.n}

    def sources(self) -> dict[str, list[int]]:
        """Return the indices of the prompts of each data source, where there are several."""
        prompts_of = defaultdict[str, list[int]](list)
        for i, prompt in enumerate(self.prompts):
            source = prompt.row.get(_SOURCE)
            if source is not None:
                prompts_of[str(source)].append(i)
        if len(prompts_of) < 2:
            return {}
        return dict(sorted(prompts_of.items()))


def val_sets(
    prompts: PromptSets, config: TrainConfig, graders: Mapping[str, RewardRunner]
) -> list[ValSet]:
    """Return the held-out sets of a run, with their rewards by name in ``graders``; none of them is empty."""
    sampling = sampling_params(config)
    sets: list[ValSet] = []
    for name, set_prompts in {"": prompts.val, **prompts.val_by_name}.items():
        settings = config.rollout.val_kwargs.of_set(name)
        if not set_prompts:
            continue
        set_sampling = replace(
            sampling,
            temperature=settings.temperature or sampling.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )
        val_set = ValSet(
            name=name,
            prompts=set_prompts,
            sampling=set_sampling,
            n=settings.n,
            reward=graders.get(name),
            right_from=settings.right_from,
        )
        sets.append(val_set)
    return sets


class EvaluationTask(NamedTuple):
    """The responses to one prompt in one way: a unit of work."""

    set: int
    """Index of its set."""
    way: Way
    prompt: int
    """Index of the prompt in its set."""


@dataclass(frozen=True, kw_only=True)
class TextEvaluation:
    """The scores of all responses that have one, and some texts."""

    sets: Sequence[ValSet]
    answered: Mapping[EvaluationTask, Answered]
    samples: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """Some prompts with their greedy responses."""
    seconds: float | None = None
    """How long it took; None: that is not known."""

    @property
    def greedy_mean(self) -> float:
        """Mean score of the greedy responses of all sets; 0 without any."""
        overall = self._estimate_overall("greedy")
        return overall.mean if overall else 0.0

    @property
    def sampled_mean(self) -> float | None:
        """Mean score of the sampled responses of all sets, each prompt counting once; None without any."""
        overall = self._estimate_overall("sampled")
        return overall.mean if overall else None

    def __str__(self) -> str:
        if self.sampled_mean is None:
            return f"{self.greedy_mean:.3f} greedy"
        return f"{self.greedy_mean:.3f} greedy, {self.sampled_mean:.3f} sampled"

    def by_set(self) -> Iterator[tuple[str, dict[str, Estimate]]]:
        """Yield the estimates of each set, and of its data sources, by ``NAME`` and ``NAME/SOURCE``; see `estimates`.

        Those of greedy responses are ``greedy``.
        """
        for set_index, val_set in enumerate(self.sets):
            yield val_set.name, self._estimate(set_index, range(len(val_set.prompts)))
            for source, prompts in val_set.sources().items():
                yield f"{val_set.name}/{source}".strip("/"), self._estimate(set_index, prompts)

    def metrics(self) -> dict[str, float]:
        """Return the means and their standard errors by their names in metrics.jsonl.

        ``val/greedy/score/mean`` and ``val/sampled/score/mean`` are of all prompts; ``val/NAME/greedy``,
        ``val/NAME/avg@n``, ``val/NAME/pass@k`` and ``val/NAME/maj@k`` of one set, or of one data source of it, without
        ``NAME/`` those of the set that has no name. Each has its standard error at ``/stderr``.
        """
        metrics: dict[str, float] = {}

        def add(name: str, estimate: Estimate, mean: str = "") -> None:
            metrics[f"{name}{mean}"] = estimate.mean
            if estimate.stderr is not None:
                metrics[f"{name}/stderr"] = estimate.stderr

        for way in ("greedy", "sampled"):
            overall = self._estimate_overall(way)
            if overall:
                add(f"val/{way}/score", overall, "/mean")
        for name, by_key in self.by_set():
            for key, estimate in by_key.items():
                if name:
                    add(f"val/{name}/{key}", estimate)
                elif key not in ("greedy", "avg@1"):
                    # Without a name these two are the overall ones.
                    add(f"val/{key}", estimate)
        if self.seconds is not None:
            metrics["timing_s/val"] = self.seconds
        return metrics

    def lines(self) -> list[str]:
        """Return the mean scores, and a line for each set with a name, for the screen."""
        lines = [f"held-out score {self}"]
        for name, by_key in self.by_set():
            if name and by_key:
                estimates_of_set = ", ".join(
                    f"{key} {estimate}" for key, estimate in by_key.items()
                )
                lines.append(f"{name}: {estimates_of_set}")
        return lines

    def _estimate_overall(self, way: Way) -> Estimate | None:
        means = [
            math.fsum(p.scores) / len(p.scores)
            for task, p in self.answered.items()
            if task.way == way
        ]
        return Estimate.of(means) if means else None

    def _estimate(self, set_index: int, prompts: Sequence[int]) -> dict[str, Estimate]:
        answered: dict[Way, list[Answered]] = {"greedy": [], "sampled": []}
        for way, of_way in answered.items():
            for prompt in prompts:
                task = EvaluationTask(set_index, way, prompt)
                if task in self.answered:
                    of_way.append(self.answered[task])
        right_from = self.sets[set_index].right_from
        by_key = estimates(answered["sampled"], right_from=right_from)
        greedy = estimates(answered["greedy"], right_from=right_from)
        if greedy:
            by_key = {"greedy": greedy["avg@1"]} | by_key
        return by_key


async def evaluate(
    roles: RolloutRoles,
    sets: Sequence[ValSet],
    *,
    group: Collectives | None = None,
    timer: StageTimer | None = None,
    clock: Callable[[], float] | None = None,
    done: Mapping[EvaluationTask, Answered] | None = None,
    finished: Callable[[EvaluationTask, Group], None] | None = None,
) -> TextEvaluation:
    """Answer every prompt greedily and by sampling; the result is the same on every controller.

    All responses of a controller are given to its engines at once. Those without a score do not count. With a
    comparison, the greedy and the sampled response to a prompt are compared with each other.

    Args:
        roles: those that generate and score.
        sets: the prompts, with n of 1 where there is a comparison.
        group: the controllers; None: there is one.
        timer: times the stages.
        clock: returns seconds, for `TextEvaluation.seconds`; None: they are not measured.
        done: what was answered before, and is not generated again.
        finished: called with each group of scored responses as soon as it is complete, before any comparison.
    """
    group = group or InlineCollectives()
    timer = timer or StageTimer()
    start_s = clock() if clock else 0.0
    answered = dict(done or {})
    indices: list[tuple[int, int]] = []
    for set_index, val_set in enumerate(sets):
        indices += [(set_index, prompt) for prompt in range(len(val_set.prompts))]
    work = defaultdict[tuple[int, Way], list[tuple[int, Prompt]]](list)
    for set_index, prompt in indices[group.rank :: group.world_size]:
        for way in sets[set_index].num_responses:
            if EvaluationTask(set_index, way, prompt) not in answered:
                work[set_index, way].append((prompt, sets[set_index].prompts[prompt]))
    running: dict[tuple[int, Way], asyncio.Task[list[Group]]] = {}
    try:
        async with asyncio.TaskGroup() as task_group:
            for (set_index, way), prompts in work.items():
                generating = _generate(
                    roles, sets[set_index], set_index, way, prompts, timer, finished
                )
                running[set_index, way] = task_group.create_task(generating)
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    groups: dict[EvaluationTask, Group] = {}
    for (set_index, way), generated in running.items():
        for responses in generated.result():
            groups[EvaluationTask(set_index, way, responses.prompt_index)] = responses
    if roles.comparison is not None:
        with timer.stage("reward"):
            groups = await _compare_responses(roles, sets, groups)
    samples: dict[tuple[int, int], dict[str, object]] = {}
    for set_index, prompt in indices[:_NUM_SHOWN]:
        greedy = groups.get(EvaluationTask(set_index, "greedy", prompt))
        if greedy is not None:
            samples[set_index, prompt] = _sample(
                sets[set_index].prompts[prompt], greedy, roles.tokenizer
            )
    answers: dict[EvaluationTask, Answered] = {}
    for task, responses in groups.items():
        group_answers = tuple(response.answer for response in responses.responses)
        answers[task] = Answered(scores=tuple(responses.scores), answers=group_answers)
    all_samples: dict[tuple[int, int], dict[str, object]] = {}
    for rank_answers, rank_samples in await group.all_gather((answers, samples)):
        answered |= rank_answers
        all_samples |= rank_samples
    return TextEvaluation(
        sets=sets,
        # In one order on any number of controllers.
        answered=dict(sorted(answered.items())),
        samples=[all_samples[key] for key in sorted(all_samples)],
        seconds=clock() - start_s if clock else None,
    )


async def _generate(
    roles: RolloutRoles,
    val_set: ValSet,
    set_index: int,
    way: Way,
    prompts: Sequence[tuple[int, Prompt]],
    timer: StageTimer,
    finished: Callable[[EvaluationTask, Group], None] | None,
) -> list[Group]:
    def report(group: Group) -> None:
        if finished is not None:
            finished(EvaluationTask(set_index, way, group.prompt_index), group)

    generation = Generation(
        roles=replace(roles, reward=val_set.reward or roles.reward),
        sampling=val_set.sampling
        if way == "sampled"
        else replace(val_set.sampling, temperature=0.0),
        n=val_set.num_responses[way],
        seed=_SEED,
        time_stage=timer.stage,
        finished=report,
    )
    groups, _ = await generation.run(prompts)
    return groups


async def _compare_responses(
    roles: RolloutRoles, sets: Sequence[ValSet], groups: Mapping[EvaluationTask, Group]
) -> dict[EvaluationTask, Group]:
    """Return the groups with the scores of their comparisons, without prompts that lack one of both responses.

    Sets with a reward of their own are not compared.
    """
    assert roles.comparison is not None
    scored_groups: dict[EvaluationTask, Group] = {}
    pairs: list[tuple[EvaluationTask, EvaluationTask]] = []
    pair_groups: list[tuple[Group, Prompt]] = []
    for task, group in groups.items():
        if sets[task.set].reward is not None:
            scored_groups[task] = group
            continue
        sampled = EvaluationTask(set=task.set, way="sampled", prompt=task.prompt)
        if task.way == "greedy" and sampled in groups:
            responses = group.responses + groups[sampled].responses
            pair = replace(group, prompt_index=len(pairs), responses=responses)
            pairs.append((task, sampled))
            pair_groups.append((pair, sets[task.set].prompts[task.prompt]))
    for pair in await roles.comparison.run(pair_groups, roles.tokenizer):
        for task, response in zip(pairs[pair.prompt_index], pair.responses, strict=True):
            scored_groups[task] = replace(groups[task], responses=[response])
    return scored_groups


def _sample(prompt: Prompt, group: Group, tokenizer: Any) -> dict[str, object]:
    [response] = group.responses
    text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
    row: dict[str, object] = {"prompt": prompt.text, "completion": text, "score": response.score}
    answer = prompt.row.get("answer")
    if answer is not None:
        row["answer"] = str(answer)
    return row
