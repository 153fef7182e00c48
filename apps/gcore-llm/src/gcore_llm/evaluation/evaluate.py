"""Evaluation on sets of prompts, by all controllers and engines at once."""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from gcore_controller import Collectives, InlineCollectives, InlineGroup, StageTimer
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
        return {"greedy": 1, "sampled": self.n} if self.n else {"greedy": 1}

    def sources(self) -> dict[str, list[int]]:
        """Return the places of the prompts of each data source, where there are several."""
        found = defaultdict[str, list[int]](list)
        for place, prompt in enumerate(self.prompts):
            if (source := prompt.row.get(_SOURCE)) is not None:
                found[str(source)].append(place)
        return dict(sorted(found.items())) if len(found) > 1 else {}


def val_sets(prompts: PromptSets, config: TrainConfig, graders: Mapping[str, RewardRunner]) -> list[ValSet]:
    """Return the held-out sets of a run, with their rewards by name in ``graders``; none of them is empty."""
    sampling, found = sampling_params(config), list[ValSet]()
    for name, own in {"": prompts.val, **prompts.named}.items():
        settings = config.rollout.val_kwargs.of_set(name)
        own_sampling = replace(
            sampling,
            temperature=settings.temperature or sampling.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
        )
        found.append(
            ValSet(
                name=name,
                prompts=own,
                sampling=own_sampling,
                n=settings.n,
                reward=graders.get(name),
                right_from=settings.right_from,
            )
        )
    return [own for own in found if own.prompts]


class Task(NamedTuple):
    """The responses to one prompt in one way: a unit of work."""

    set: int
    """Place of its set."""
    way: Way
    prompt: int
    """Place of the prompt in its set."""

    @property
    def sampled(self) -> "Task":
        """The sampled responses to the same prompt."""
        return Task(self.set, "sampled", self.prompt)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of all responses that have one, and some texts."""

    sets: Sequence[ValSet]
    answered: Mapping[Task, Answered]
    samples: list[dict[str, object]] = field(default_factory=list[dict[str, object]])
    """Some prompts with their greedy responses."""
    seconds: float | None = None
    """How long it took; None: that is not known."""

    @property
    def greedy(self) -> float:
        """Mean score of the greedy responses of all sets; 0 without any."""
        found = self._overall("greedy")
        return found.mean if found else 0.0

    @property
    def sampled(self) -> float | None:
        """Mean score of the sampled responses of all sets, each prompt counting once; None without any."""
        found = self._overall("sampled")
        return found.mean if found else None

    def __str__(self) -> str:
        sampled = "" if self.sampled is None else f", {self.sampled:.3f} sampled"
        return f"{self.greedy:.3f} greedy{sampled}"

    def by_set(self) -> Iterator[tuple[str, dict[str, Estimate]]]:
        """Yield the estimates of each set, and of its data sources, by ``NAME`` and ``NAME/SOURCE``; see `estimates`.

        Those of greedy responses are ``greedy``.
        """
        for place, own in enumerate(self.sets):
            yield own.name, self._estimates(place, range(len(own.prompts)))
            for source, prompts in own.sources().items():
                yield f"{own.name}/{source}".strip("/"), self._estimates(place, prompts)

    def metrics(self) -> dict[str, float]:
        """Return the means and their standard errors by their names in metrics.jsonl.

        ``val/greedy/score/mean`` and ``val/sampled/score/mean`` are of all prompts; ``val/NAME/greedy``,
        ``val/NAME/avg@n``, ``val/NAME/pass@k`` and ``val/NAME/maj@k`` of one set, or of one data source of it, without
        ``NAME/`` those of the set that has no name. Each has its standard error at ``/stderr``.
        """
        found: dict[str, float] = {}
        for way in ("greedy", "sampled"):
            if estimate := self._overall(way):
                found |= _named(f"val/{way}/score", estimate, mean="/mean")
        for name, own in self.by_set():
            # Without a name they are the overall ones.
            left_out = ("greedy", "avg@1") if not name else ()
            for key, estimate in own.items():
                if key not in left_out:
                    found |= _named("/".join(filter(None, ("val", name, key))), estimate)
        return found if self.seconds is None else found | {"timing_s/val": self.seconds}

    def lines(self) -> list[str]:
        """Return the mean scores, and a line for each set with a name, for the screen."""
        sets = [(name, own) for name, own in self.by_set() if name and own]
        of_sets = [f"{name}: {', '.join(f'{key} {one}' for key, one in own.items())}" for name, own in sets]
        return [f"held-out score {self}", *of_sets]

    def _overall(self, way: Way) -> Estimate | None:
        scores = [one.scores for task, one in self.answered.items() if task.way == way]
        return Estimate.of([math.fsum(own) / len(own) for own in scores]) if scores else None

    def _estimates(self, place: int, prompts: Sequence[int]) -> dict[str, Estimate]:
        right_from = self.sets[place].right_from
        found: dict[str, Estimate] = {}
        for way in ("greedy", "sampled"):
            tasks = (Task(place, way, prompt) for prompt in prompts)
            own = estimates([self.answered[task] for task in tasks if task in self.answered], right_from=right_from)
            found |= {"greedy" if way == "greedy" else key: estimate for key, estimate in own.items()}
        return found


def _named(name: str, estimate: Estimate, *, mean: str = "") -> dict[str, float]:
    found = {f"{name}{mean}": estimate.mean}
    return found if estimate.stderr is None else found | {f"{name}/stderr": estimate.stderr}


def answered(group: Group) -> Answered:
    """Return the scores and answers of a group of responses."""
    return Answered(scores=tuple(group.scores), answers=tuple(response.answer for response in group.responses))


async def evaluate(
    roles: RolloutRoles,
    sets: Sequence[ValSet],
    *,
    group: Collectives | None = None,
    timer: StageTimer | None = None,
    clock: Callable[[], float] | None = None,
    done: Mapping[Task, Answered] | None = None,
    finished: Callable[[Task, Group], None] | None = None,
) -> Evaluation:
    """Answer every prompt greedily and by sampling; the result is the same on every controller.

    All responses of a controller are given to its engines at once. Those without a score do not count. With a
    comparison, the greedy and the sampled response to a prompt are compared with each other.

    Args:
        roles: those that generate and score.
        sets: the prompts, with n of 1 where there is a comparison.
        group: the controllers; None: there is one.
        timer: times the stages.
        clock: returns seconds, for `Evaluation.seconds`; None: they are not measured.
        done: what was answered before, and is not generated again.
        finished: called with each group of scored responses as soon as it is complete, before any comparison.
    """
    group, timer = group or InlineCollectives(InlineGroup(1), 0), timer or StageTimer()
    done, start_s = done or {}, clock() if clock else 0.0
    places = [(number, place) for number, own in enumerate(sets) for place in range(len(own.prompts))]
    mine = places[group.rank :: group.world_size]
    work = defaultdict[tuple[int, Way], list[tuple[int, Prompt]]](list)
    for number, place in mine:
        for way in sets[number].num_responses:
            if Task(number, way, place) not in done:
                work[number, way].append((place, sets[number].prompts[place]))
    try:
        async with asyncio.TaskGroup() as running:
            tasks = {
                key: running.create_task(_generate(roles, sets[key[0]], *key, prompts, timer, finished))
                for key, prompts in work.items()
            }
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    groups = {Task(*key, one.prompt_index): one for key, task in tasks.items() for one in task.result()}
    if roles.comparison is not None:
        with timer.stage("reward"):
            groups = await _compared(roles, sets, groups)
    shown: list[tuple[tuple[int, int], dict[str, object]]] = []
    for number, place in places[:_NUM_SHOWN]:
        if one := groups.get(Task(number, "greedy", place)):
            shown.append(((number, place), _sample(sets[number].prompts[place], one, roles.tokenizer)))
    own = {task: answered(one) for task, one in groups.items()}
    parts = await group.all_gather((own, shown))
    found = dict(done) | {task: one for answers, _ in parts for task, one in answers.items()}
    samples = sorted((entry for _, rows in parts for entry in rows), key=lambda entry: entry[0])
    return Evaluation(
        sets=sets,
        # In one order on any number of controllers.
        answered=dict(sorted(found.items())),
        samples=[row for _, row in samples],
        seconds=clock() - start_s if clock else None,
    )


async def _generate(
    roles: RolloutRoles,
    own: ValSet,
    number: int,
    way: Way,
    prompts: Sequence[tuple[int, Prompt]],
    timer: StageTimer,
    finished: Callable[[Task, Group], None] | None,
) -> list[Group]:
    generation = Generation(
        roles=roles if own.reward is None else replace(roles, reward=own.reward),
        sampling=own.sampling if way == "sampled" else replace(own.sampling, temperature=0.0),
        n=own.num_responses[way],
        seed=_SEED,
        timer=timer,
        finished=None if finished is None else lambda group: finished(Task(number, way, group.prompt_index), group),
    )
    return (await generation.run(prompts))[0]


async def _compared(roles: RolloutRoles, sets: Sequence[ValSet], groups: Mapping[Task, Group]) -> dict[Task, Group]:
    """Return the groups with the scores of their comparisons, without prompts that lack one of both responses.

    Sets with a reward of their own are not compared.
    """
    assert roles.comparison is not None
    found = {task: group for task, group in groups.items() if sets[task.set].reward is not None}
    compared = groups.keys() - found.keys()
    pairs = [(task, task.sampled) for task in groups if task in compared and task.way == "greedy"]
    pairs = [(task, other) for task, other in pairs if other in groups]
    both = [
        replace(groups[a], prompt_index=i, responses=groups[a].responses + groups[b].responses)
        for i, (a, b) in enumerate(pairs)
    ]
    prompts = [sets[task.set].prompts[task.prompt] for task, _ in pairs]
    for scored in await roles.comparison.run(list(zip(both, prompts, strict=True)), roles.tokenizer):
        for task, response in zip(pairs[scored.prompt_index], scored.responses, strict=True):
            found[task] = replace(groups[task], responses=[response])
    return found


def _sample(prompt: Prompt, group: Group, tokenizer: Any) -> dict[str, object]:
    [response] = group.responses
    text = tokenizer.decode(response.token_ids, skip_special_tokens=True)
    row: dict[str, object] = {"prompt": prompt.text, "completion": text, "score": response.score}
    answer = prompt.row.get("answer")
    return row if answer is None else row | {"answer": str(answer)}
