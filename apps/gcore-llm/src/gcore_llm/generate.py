"""From prompts to scored groups, on one controller: rewards are computed while others are still being generated."""

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np

from gcore_controller import StageTimer
from gcore_llm.groups import Group, Response
from gcore_llm.prompts import Prompt
from gcore_llm.roles import Sampler
from gcore_rollout import Completion, Request, SamplingParams
from gcore_rollout.rewards import score


async def generate_groups(
    sampler: Sampler,
    prompts: Sequence[tuple[int, Prompt]],
    *,
    sampling: SamplingParams,
    n: int,
    seed: int,
    timer: StageTimer,
    with_greedy: bool = False,
) -> list[Group]:
    """Complete each ticketed prompt ``n`` times and score every completion, in the prompts' order.

    With ``with_greedy``, each prompt's greedy completion is made and scored beside them.

    What is drawn for a ticket depends on the ticket, ``seed`` and the weights alone.
    """
    by_id = {str(ticket): prompt for ticket, prompt in prompts}
    greedy = [
        Request(
            request_id=f"{ticket}/greedy",
            prompt_token_ids=prompt.token_ids,
            sampling=dataclasses.replace(sampling, temperature=0.0),
            n=1,
            seed=0,
        )
        for ticket, prompt in (prompts if with_greedy else [])
    ]
    requests = [
        Request(
            request_id=str(ticket),
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            n=n,
            seed=hash((seed, ticket)),
        )
        for ticket, prompt in prompts
    ]
    responses: dict[str, list[Response | None]] = {r.request_id: [None] * r.n for r in [*requests, *greedy]}

    async def place(completion: Completion) -> None:
        prompt = by_id[completion.request_id.removesuffix("/greedy")]
        responses[completion.request_id][completion.index] = await _scored(sampler, prompt, completion)

    with timer.stage("gen"):
        scoring = [asyncio.create_task(place(c)) async for c in sampler.policy.generate([*requests, *greedy])]
    with timer.stage("reward"):
        try:
            await asyncio.gather(*scoring)
        finally:
            for task in scoring:
                task.cancel()
    return [
        Group(
            ticket=ticket,
            prompt_ids=np.array(prompt.token_ids, np.int64),
            responses=[r for r in responses[str(ticket)] if r is not None],
            greedy_score=next((r.score for r in responses.get(f"{ticket}/greedy", []) if r is not None), None),
        )
        for ticket, prompt in prompts
    ]


async def _scored(sampler: Sampler, prompt: Prompt, completion: Completion) -> Response:
    text: str = sampler.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    value = await score(sampler.reward, prompt=prompt.text, completion=text, row=prompt.row)
    return Response(
        token_ids=completion.token_ids,
        log_probs=completion.log_probs,
        weight_versions=completion.weight_versions,
        truncated=completion.finish_reason == "length",
        score=value,
    )
