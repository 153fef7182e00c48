"""Sessions of agents in simulated time, and their model from the journal of a run."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gcore_llm.agents.episodes import EngineSampler
from gcore_placement import log_normal, uniform
from gcore_rollout import Completion, Engine, Prompt, SamplingParams
from gcore_runs import UserError, read_jsonl
from gcore_runs.simulation.config import LengthModel, SessionModel, SimConfig
from gcore_runs.simulation.services import sample_name
from gcore_runs.simulation.tokens import draw_length

_SESSION_STREAM = 7


async def play_session(
    config: SimConfig,
    run_seed: int,
    policy: Engine,
    prompt: Prompt,
    request_id: str,
    sampling: SamplingParams,
    seed: int,
) -> Completion:
    """Play a session of drawn turns and messages on a modelled engine, which computes each token once.

    See `EpisodeRole.play`; it sleeps while the agent would work.
    """
    model = config.sessions
    draw = partial(uniform, run_seed, _SESSION_STREAM, seed)
    sampler = EngineSampler(engine=policy, sampling=sampling)
    await asyncio.sleep(model.start_s)
    new_ids = prompt.token_ids
    versions: list[int] = []
    is_over = False
    for turn in range(draw_length(draw(0), model.turns, 1)):
        if turn:
            size = draw_length(draw(turn, 1), model.message_length, config.token_unit)
            is_over = len(versions) + size >= sampling.max_tokens
            if is_over:
                break
            versions += [-1] * size
            new_ids = prompt.token_ids[:1] * size
        num_left = sampling.max_tokens - len(versions)
        sampled = await sampler.sample(
            new_ids, session=request_id, seed=hash((seed, turn)), max_tokens=num_left
        )
        versions += sampled.weight_versions
        await asyncio.sleep(log_normal(draw(turn, 2), **vars(model.tool_s)))
    prompt_index, _, index = request_id.partition("/")
    name = sample_name(int(prompt_index), int(index))
    is_sampled = np.array(versions) >= 0
    return Completion(
        request_id=request_id,
        index=0,
        token_ids=np.full(len(versions), name),
        log_probs=-is_sampled.astype(np.float32),
        weight_versions=np.array(versions, np.int32),
        mask=is_sampled,
        finish_reason="stop",
        prompt_ids=np.array(prompt.token_ids),
        turns=(str(name),),
        end="length" if is_over else "done",
    )


def fit_sessions(folder: Path) -> Mapping[str, Any]:
    """Return settings of `SimConfig` with the means and variances of the sessions of a run's journal.

    Calls at once count as one after the other. `UserError` if there are no sessions with times.
    """
    turns: list[float] = []
    turn_lengths: list[float] = []
    message_lengths: list[float] = []
    tool_s: list[float] = []
    start_s: list[float] = []
    for path in sorted(folder.glob("*.jsonl")):
        for record in read_jsonl(path):
            sampled = [node for node in record["nodes"] if "end_s" in node]
            if not sampled:
                continue
            turns.append(len(sampled))
            start_s.append(sampled[0]["start_s"])
            next_s = [node["start_s"] for node in sampled[1:]] + [record["duration_s"]]
            for node, later_s in zip(sampled, next_s, strict=True):
                turn_lengths.append(len(node["token_ids"]))
                tool_s.append(max(0.0, later_s - node["end_s"]))
            message_lengths += [
                len(node["token_ids"])
                for node in record["nodes"]
                if node["parent"] >= 0 and "end_s" not in node
            ]
    if not turns:
        raise UserError(
            f"{folder} has no sessions with times; expected those of a run with an agent"
        )
    model = SessionModel(
        turns=_fit(turns),
        message_length=_fit(message_lengths or [1.0]),
        tool_s=_fit(tool_s),
        start_s=float(np.mean(start_s)),
    )
    return {"sessions": model, "response_length": _fit(turn_lengths)}


def _fit(values: Sequence[float]) -> LengthModel:
    return LengthModel.of_moments(float(np.mean(values)), float(np.var(values)))
