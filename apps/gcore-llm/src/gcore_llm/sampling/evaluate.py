"""Held-out evaluation, greedy and sampled, divided among the controllers."""

from dataclasses import dataclass, replace

from gcore_controller import Collectives, StageTimer
from gcore_llm.data.prompts import Prompt
from gcore_llm.roles import SamplingRoles
from gcore_llm.sampling.comparison import Comparison
from gcore_llm.sampling.generate import Generation
from gcore_llm.sampling.groups import Group
from gcore_rollout import SamplingParams

_SEED = 20_250_729
_NUM_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean scores on the held-out prompts, and some answers."""

    greedy: float
    sampled: float
    samples: list[dict[str, object]]

    def metrics(self) -> dict[str, float]:
        """Return the scores by their names in metrics.jsonl."""
        return {"val/greedy/score/mean": self.greedy, "val/sampled/score/mean": self.sampled}


async def evaluate(
    sampler: SamplingRoles,
    prompts: list[Prompt],
    *,
    group: Collectives,
    timer: StageTimer,
    max_tokens: int,
    temperature: float,
) -> Evaluation:
    """Answer every held-out prompt greedily and by sampling once; the result is the same on every controller.

    Answers without a score do not count. With a comparison, the two answers to a prompt are compared with each other.
    """
    mine = list(enumerate(prompts))[group.rank :: group.world_size]
    both: list[list[Group]] = []
    for sampling in (
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        SamplingParams(max_tokens=max_tokens, temperature=temperature),
    ):
        generation = Generation(sampler=sampler, sampling=sampling, n=1, seed=_SEED, timer=timer)
        both.append((await generation.run(mine)).groups)
    if sampler.comparison is not None:
        with timer.stage("reward"):
            both = await _compared(sampler, sampler.comparison, prompts, *both)
    means: list[float] = []
    for groups in both:
        count = await group.all_reduce(len(groups))
        means.append(await group.all_reduce(sum(g.scores[0] for g in groups)) / max(count, 1))
    shown = [
        (g.prompt_index, _shown(sampler, prompts[g.prompt_index], g)) for g in both[0] if g.prompt_index < _NUM_SHOWN
    ]
    everyones = [entry for part in await group.all_gather(shown) for entry in part]
    samples = [row for _, row in sorted(everyones, key=lambda entry: entry[0])]
    return Evaluation(greedy=means[0], sampled=means[1], samples=samples)


async def _compared(
    sampler: SamplingRoles, comparison: Comparison, prompts: list[Prompt], greedy: list[Group], sampled: list[Group]
) -> list[list[Group]]:
    """Return both answers to each prompt, scored against each other; prompts without both answers are left out."""
    others = {g.prompt_index: g.responses for g in sampled}
    pairs = [replace(g, responses=[*g.responses, *others[g.prompt_index]]) for g in greedy if g.prompt_index in others]
    scored = await comparison.run([(pair, prompts[pair.prompt_index]) for pair in pairs], sampler.tokenizer)
    return [[replace(pair, responses=[pair.responses[i]]) for pair in scored] for i in range(2)]


def _shown(sampler: SamplingRoles, prompt: Prompt, group: Group) -> dict[str, object]:
    response = group.responses[0]
    row: dict[str, object] = {
        "prompt": prompt.text,
        "completion": sampler.tokenizer.decode(response.token_ids, skip_special_tokens=True),
        "score": response.score,
    }
    answer = prompt.row.get("answer")
    return row | {"answer": str(answer)} if answer is not None else row
