"""Sessions of agents in simulated time, and their model from the journal of a run."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_llm.agents.episodes import EngineSampler
from gcore_placement import log_normal, uniform
from gcore_rollout import Completion, Engine, Prompt, SamplingParams
from gcore_runs import UserError, read_jsonl
from gcore_runs.simulation.config import LengthModel, SessionModel, SimConfig
from gcore_runs.simulation.services import sample_name
from gcore_runs.simulation.tokens import draw_length

_SESSION_STREAM = 7


@dataclass(frozen=True, kw_only=True)
class SimulatedSessions:
    """Plays sessions of drawn turns and messages on a modelled engine, which computes each token once."""

    config: SimConfig
    seed: int

    async def play(
        self, policy: Engine, prompt: Prompt, request_id: str, sampling: SamplingParams, seed: int
    ) -> Completion:
        """Play one session, see `EpisodeRole.play`; it sleeps while the agent would work."""
        model = self.config.sessions
        unit = self.config.token_unit
        draw = partial(uniform, self.seed, _SESSION_STREAM, seed)
        num_turns = draw_length(draw(0), model.turns, 1)
        sampler = EngineSampler(engine=policy, sampling=sampling)
        await asyncio.sleep(model.start_s)
        added = prompt.token_ids
        versions: list[int] = []
        for turn in range(1, num_turns + 1):
            sampled = await sampler.sample(
                added,
                session=request_id,
                seed=hash((seed, turn)),
                max_tokens=sampling.max_tokens - len(versions),
            )
            versions += sampled.weight_versions
            tool_s = log_normal(draw(turn, 0), median=model.tool_s.median, sigma=model.tool_s.sigma)
            await asyncio.sleep(tool_s)
            size = draw_length(draw(turn, 1), model.message_length, unit)
            is_over = len(versions) + size >= sampling.max_tokens
            if turn == num_turns or is_over:
                break
            versions += [-1] * size
            added = prompt.token_ids[:1] * size
        prompt_index, _, index = request_id.partition("/")
        return self._make_completion(
            request_id, prompt, sample_name(int(prompt_index), int(index)), np.array(versions)
        )

    def _make_completion(
        self, request_id: str, prompt: Prompt, name: int, versions: NDArray[np.int64]
    ) -> Completion:
        return Completion(
            request_id=request_id,
            index=0,
            token_ids=np.full(versions.shape, name),
            log_probs=np.where(versions < 0, 0.0, -1.0).astype(np.float32),
            weight_versions=versions.astype(np.int32),
            mask=versions >= 0,
            finish_reason="stop",
            prompt_ids=np.array(prompt.token_ids),
            turns=(str(name),),
            end="done",
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
            if "duration_s" not in record:
                continue
            sampled = [node for node in record["nodes"] if "end_s" in node]
            messages = [node for node in record["nodes"] if "end_s" not in node]
            turns.append(len(sampled))
            starts = [*(node["start_s"] for node in sampled), record["duration_s"]]
            start_s.append(starts[0])
            for node, next_s in zip(sampled, starts[1:], strict=True):
                turn_lengths.append(len(node["token_ids"]))
                tool_s.append(max(0.0, next_s - node["end_s"]))
            message_lengths += [len(node["token_ids"]) for node in messages if node["parent"] >= 0]
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
