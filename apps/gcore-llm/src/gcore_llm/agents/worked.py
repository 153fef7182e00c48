"""Worked examples of an agent: its conversations about rows whose turns are known."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gcore_agents import render_chat
from gcore_llm.config import TrainConfig
from gcore_rollout import Completion, EpisodeRole, Prompt, Request, SamplingParams, load_function
from gcore_runs import Display, UserError
from gcore_trainer import Sample

_NAME = "worked_turns"
_MOST = 1_000
"""Most conversations; one takes about 15 ms."""
_AT_ONCE = 32


async def work_episodes(
    config: TrainConfig,
    episodes: EpisodeRole,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    display: Display,
) -> list[Sample]:
    """Return samples of an agent's conversations in which the policy writes what it should.

    The function ``worked_turns`` in the agent's file returns the policy's turns for a row, as chat messages.

    Raises:
        UserError: there is no such function.
    """
    path = config.rollout.agent.run.partition(".py:")[0]
    if not path or config.rollout.agent.command:
        raise UserError(
            f"rollout.agent.run is {config.rollout.agent.run!r}; expected PATH.py:function, whose file has a function "
            f"{_NAME} to warm up the embedded model with, or a model of your own: --model FOLDER"
        )
    work: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]] = load_function(
        f"{path}.py:{_NAME}", setting=f"{_NAME} of the agent's file"
    )
    prompts = prompts[:_MOST]
    display.phase("worked conversations", total=len(prompts))
    running = asyncio.Semaphore(_AT_ONCE)
    num_done = 0

    async def play(number: int, prompt: Prompt) -> Sample:
        nonlocal num_done
        turns = [_write_turn(tokenizer, message) for message in work(prompt.row)]
        sampling = SamplingParams(max_tokens=config.data.max_response_length)
        async with running:
            episode = await episodes.play(WorkedTurns(turns), prompt, str(number), sampling, 0)  # pyright: ignore[reportArgumentType] - it only generates
        assert episode.prompt_ids is not None
        num_done += 1
        display.show_progress(num_done)
        return Sample(
            prompt_ids=episode.prompt_ids,
            response_ids=episode.token_ids,
            response_mask=episode.mask,
            forks=episode.forks,
        )

    return await asyncio.gather(*(play(i, p) for i, p in enumerate(prompts)))


def _write_turn(tokenizer: Any, message: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a turn as the chat template writes it."""
    question = {"role": "user", "content": "?"}
    turn = {"role": "assistant", "content": "", **message}
    start = render_chat(tokenizer, [question], tokenize=False, add_generation_prompt=True)
    text: str = render_chat(tokenizer, [question, turn], tokenize=False)
    return tokenizer(text.removeprefix(start), add_special_tokens=False)["input_ids"]


@dataclass(eq=False)
class WorkedTurns:
    """Stands for an engine: answers one request after the other with known turns."""

    turns: list[list[int]]
    weight_version: int = 0

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        """Yield the next turn; if there is none, an empty answer."""
        [request] = requests
        tokens = np.array(self.turns.pop(0) if self.turns else [1], np.int64)
        yield Completion(
            request_id=request.request_id,
            index=0,
            token_ids=tokens,
            log_probs=np.zeros(tokens.size, np.float32),
            weight_versions=np.zeros(tokens.size, np.int32),
            finish_reason="stop",
        )
