"""Held-out evaluation: greedy and sampled, shared out among the controllers."""

from dataclasses import dataclass

from gcore_controller import Collectives, StageTimer
from gcore_llm.generate import Generation
from gcore_llm.groups import Group
from gcore_llm.prompts import Prompt
from gcore_llm.roles import Sampler
from gcore_rollout import SamplingParams

_SEED = 20_250_729
_NUM_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean scores on the held-out prompts, and some answers to look at."""

    greedy: float
    sampled: float
    samples: list[dict[str, object]]

    def metrics(self) -> dict[str, float]:
        return {"val/greedy/score/mean": self.greedy, "val/sampled/score/mean": self.sampled}


async def evaluate(
    sampler: Sampler,
    prompts: list[Prompt],
    *,
    group: Collectives,
    timer: StageTimer,
    max_tokens: int,
    temperature: float,
) -> Evaluation:
    """Answer every held-out prompt greedily and by sampling once; the same on every controller.

    Answers for which the reward has no score do not count.
    """
    mine = list(enumerate(prompts))[group.rank :: group.world_size]
    means: list[float] = []
    shown: list[tuple[int, dict[str, object]]] = []
    for sampling in (
        SamplingParams(max_tokens=max_tokens, temperature=0.0),
        SamplingParams(max_tokens=max_tokens, temperature=temperature),
    ):
        generation = Generation(sampler=sampler, sampling=sampling, n=1, seed=_SEED, timer=timer)
        groups = (await generation.run(mine)).groups
        count = await group.all_reduce(len(groups))
        means.append(await group.all_reduce(sum(g.scores[0] for g in groups)) / max(count, 1))
        if sampling.temperature == 0:
            shown = [(g.ticket, _shown(sampler, prompts[g.ticket], g)) for g in groups if g.ticket < _NUM_SHOWN]
    everyones = [entry for part in await group.all_gather(shown) for entry in part]
    samples = [row for _, row in sorted(everyones, key=lambda entry: entry[0])]
    return Evaluation(greedy=means[0], sampled=means[1], samples=samples)


def _shown(sampler: Sampler, prompt: Prompt, group: Group) -> dict[str, object]:
    response = group.responses[0]
    row: dict[str, object] = {
        "prompt": prompt.text,
        "completion": sampler.tokenizer.decode(response.token_ids, skip_special_tokens=True),
        "score": response.score,
    }
    answer = prompt.row.get("answer")
    return row | {"answer": str(answer)} if answer is not None else row
