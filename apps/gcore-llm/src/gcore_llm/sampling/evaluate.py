"""Held-out evaluation, greedy and sampled, divided among the controllers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gcore_controller import Collectives, InlineCollectives, InlineGroup, StageTimer
from gcore_llm.config import TrainConfig
from gcore_rollout import Generation, Group, Prompt, RolloutRoles, SamplingParams

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


def sampling_params(config: TrainConfig) -> SamplingParams:
    """Return how a run samples responses."""
    return SamplingParams(max_tokens=config.data.max_response_length, temperature=config.rollout.temperature)


async def evaluate(
    roles: RolloutRoles,
    prompts: Sequence[Prompt],
    config: TrainConfig,
    *,
    group: Collectives | None = None,
    timer: StageTimer | None = None,
) -> Evaluation:
    """Answer every held-out prompt greedily and by sampling once; the result is the same on every controller.

    Answers without a score do not count. With a comparison, the two answers to a prompt are compared with each other.
    Without a group there is one controller.
    """
    group, timer = group or InlineCollectives(InlineGroup(1), 0), timer or StageTimer()
    mine = list(enumerate(prompts))[group.rank :: group.world_size]
    both: list[list[Group]] = []
    sampled = sampling_params(config)
    for sampling in (replace(sampled, temperature=0.0), sampled):
        generation = Generation(roles=roles, sampling=sampling, n=1, seed=_SEED, timer=timer)
        both.append((await generation.run(mine))[0])
    if roles.comparison is not None:
        # Prompts without both answers are left out.
        others = {g.prompt_index: g.responses for g in both[1]}
        pairs = [
            replace(g, responses=g.responses + others[g.prompt_index]) for g in both[0] if g.prompt_index in others
        ]
        with timer.stage("reward"):
            scored = await roles.comparison.run([(p, prompts[p.prompt_index]) for p in pairs], roles.tokenizer)
        both = [[replace(pair, responses=[pair.responses[i]]) for pair in scored] for i in range(2)]
    means: list[float] = []
    for groups in both:
        count = await group.all_reduce(len(groups))
        means.append(await group.all_reduce(sum(g.scores[0] for g in groups)) / max(count, 1))
    shown: list[tuple[int, dict[str, object]]] = []
    for index, response in ((g.prompt_index, g.responses[0]) for g in both[0] if g.prompt_index < _NUM_SHOWN):
        text = roles.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        row: dict[str, object] = {"prompt": prompts[index].text, "completion": text, "score": response.score}
        answer = prompts[index].row.get("answer")
        shown.append((index, row if answer is None else row | {"answer": str(answer)}))
    everyones = [entry for part in await group.all_gather(shown) for entry in part]
    samples = [row for _, row in sorted(everyones, key=lambda entry: entry[0])]
    return Evaluation(greedy=means[0], sampled=means[1], samples=samples)
