"""An engine whose verdicts are scripted, and judges that ask it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import numpy as np

from gcore_rollout import (
    Completion,
    Engine,
    EngineStats,
    JudgeModel,
    PairwiseJudge,
    Request,
    SamplingParams,
)
from gcore_rollout.rewards.runner import evaluate_group

SAMPLING = SamplingParams(max_tokens=64)


class ScriptedEngine:
    """An engine that says what a function says; the tokens are the characters."""

    weight_version = 0

    def __init__(self, say: Callable[[str, int], str], delay_s: float = 0.0) -> None:
        self.say = say
        self.delay_s = delay_s
        self.requests: list[Request] = []
        self.calls = self.running = self.most_running = 0

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        self.calls += 1
        self.requests += requests
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(self.delay_s)
        self.running -= 1
        # As from an engine, not in the order of the requests.
        for request in reversed(requests):
            for index in reversed(request.sample_indices):
                token_ids = np.array(
                    encode(self.say(decode(request.prompt_token_ids), index)), np.int64
                )
                yield Completion(
                    request_id=request.request_id,
                    index=index,
                    token_ids=token_ids,
                    log_probs=np.zeros(token_ids.shape, np.float32),
                    weight_versions=np.zeros(token_ids.shape, np.int32),
                    finish_reason="stop",
                )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, *, keep_weights: bool = True) -> None: ...

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None: ...

    async def update_weights(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None: ...

    def stats(self) -> EngineStats:
        raise AssertionError("no judge asks for them")

    async def close(self) -> None: ...


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(map(chr, token_ids))


def model_of(engine: Any, **options: Any) -> JudgeModel:
    return JudgeModel(engine=engine, encode=encode, decode=decode, sampling=SAMPLING, **options)


def random_judge(engine: Engine, *, max_tokens: int, n: int) -> JudgeModel:
    """A judge that is a tiny random model: its verdicts are token ids."""
    return JudgeModel(
        engine=engine,
        encode=lambda text: [ord(c) % 96 for c in text],
        decode=lambda token_ids: " ".join(map(str, token_ids)),
        sampling=SamplingParams(max_tokens=max_tokens),
        n=n,
    )


def pairwise(
    say: Callable[[str, str], str], n: int = 1, template: str = "", **options: Any
) -> PairwiseJudge:
    """A judge that is given both completions."""
    engine = ScriptedEngine(lambda question, _: say(*question.split("|")[1:3]))
    text = template or "{prompt}|{completion_a}|{completion_b}"
    return PairwiseJudge(model=model_of(engine, n=n), template=text, **options)


async def compared(reward: PairwiseJudge, *completions: str) -> list[Any]:
    return list(await evaluate_group(reward, prompt="p", completions=completions, row={}))
