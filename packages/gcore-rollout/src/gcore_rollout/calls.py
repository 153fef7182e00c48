"""What the in-process engines share: calls, the line in which their samples wait, and checks at the door."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Generic

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.errors import RequestError
from gcore_rollout.types import Completion, FinishReason, Request, SampleT

if TYPE_CHECKING:
    from gcore_rollout.images import VisionProcessor


@dataclass(eq=False)
class Call(Generic[SampleT]):
    """One `generate` call: where its completions go, and how many are still to come."""

    pending: int
    finished: asyncio.Queue[SampleT | Exception] = field(default_factory=asyncio.Queue)
    abandoned: bool = False

    async def completions(self) -> AsyncGenerator[SampleT]:
        """Each completion as it is finished; a call left early is marked as abandoned."""
        try:
            while self.pending:
                item = await self.finished.get()
                if isinstance(item, Exception):
                    raise item
                self.pending -= 1
                yield item
        finally:
            self.abandoned = self.pending > 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One of a request's samples, from the line of those that wait to its completion."""

    call: Call
    request: Request
    index: int
    begun: Completion | None
    """What it goes on from; never without tokens."""
    shares_prompt: bool
    """An earlier sample of the request starts from the same tokens."""

    @property
    def start_token_ids(self) -> tuple[int, ...]:
        """The prompt, and what was sampled before."""
        before = () if self.begun is None else self.begun.token_ids.tolist()
        return (*self.request.prompt_token_ids, *before)

    @property
    def num_begun(self) -> int:
        return 0 if self.begun is None else self.begun.token_ids.size

    def finish(
        self,
        token_ids: NDArray[np.int64],
        log_probs: NDArray[np.float32],
        weight_versions: NDArray[np.int32],
        reason: FinishReason,
    ) -> None:
        """Hand over the completion: the tokens begun, then those given, all of shape [T]."""
        if self.begun is not None:
            token_ids = np.concatenate([self.begun.token_ids, token_ids])
            log_probs = np.concatenate([self.begun.log_probs, log_probs])
            weight_versions = np.concatenate([self.begun.weight_versions, weight_versions])
        self.call.finished.put_nowait(
            Completion(
                request_id=self.request.request_id,
                index=self.index,
                # Completions that come back from storage may have other types, and arrays here may be views.
                token_ids=token_ids.astype(np.int64),
                log_probs=log_probs.astype(np.float32),
                weight_versions=weight_versions.astype(np.int32),
                finish_reason=reason,
            )
        )

    def abort_unstarted(self) -> None:
        """Hand over what was begun, if anything."""
        self.finish(np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.int32), "abort")


class WaitingLine:
    """Samples that have not started, first come, first served."""

    def __init__(self) -> None:
        # Each entry holds samples of one request that start from the same tokens.
        self._line: deque[deque[Sample]] = deque()

    def __len__(self) -> int:
        return sum(len(group) for group in self._line)

    def join(self, requests: Sequence[Request]) -> Call:
        """A new call, its samples at the end of the line: of each request, those that go on come first."""
        call: Call = Call(pending=sum(len(r.sample_indices) for r in requests))
        self._line.extend(deque(group) for r in requests for group in _groups(call, r))
        return call

    def admit(self, room: int) -> Iterator[list[Sample]]:
        """Take up to ``room`` samples out of the line, in lists of those that start from the same tokens."""
        while self._line and room > 0:
            first = self._line[0]
            group = [first.popleft() for _ in range(min(room, len(first)))]
            room -= len(group)
            if not first:
                self._line.popleft()
            yield group

    def remove(self, which: Callable[[Sample], bool]) -> list[Sample]:
        """Take samples out of the line."""
        removed = [s for s in chain(*self._line) if which(s)]
        if removed:
            left = (deque(s for s in group if not which(s)) for group in self._line)
            self._line = deque(group for group in left if group)
        return removed


def _groups(call: Call, request: Request) -> Iterator[list[Sample]]:
    begun = {c.index: c for c in request.begun if c.token_ids.size}
    for index, completion in begun.items():
        yield [Sample(call=call, request=request, index=index, begun=completion, shares_prompt=False)]
    new = [i for i in request.sample_indices if i not in begun]
    if new:
        yield [Sample(call=call, request=request, index=i, begun=None, shares_prompt=i != new[0]) for i in new]


def check_request(
    request: Request, *, max_length: int, vocab_size: int, vision: "VisionProcessor | None" = None
) -> None:
    """Refuse a request that the model cannot take.

    Args:
        request: to be checked.
        max_length: tokens that the model takes in all.
        vocab_size: tokens that it knows.
        vision: what it reads images with; None: it does not.

    Raises:
        RequestError: too many tokens in all, a token outside the vocabulary, or images that do not fit the prompt.
    """
    if request.images and vision is None:
        raise RequestError(
            f"request {request.request_id!r} has {len(request.images)} images: the engine takes none, the hf and vllm "
            "engines do with a vision-language model"
        )
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    need = len(prompt) + max_tokens
    if need > max_length:
        raise RequestError(
            f"request {request.request_id!r} needs {len(prompt)} prompt + {max_tokens} completion tokens = {need}: "
            f"the model takes at most {max_length}"
        )
    begun = [c.token_ids for c in request.begun if c.token_ids.size]
    for name, tokens in (("prompt", np.array(prompt)), *(("begun", t) for t in begun)):
        if not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise RequestError(
                f"request {request.request_id!r} has {name} tokens from {tokens.min()} to {tokens.max()}: "
                f"the model knows 0 to {vocab_size - 1}"
            )
    if request.images and vision is not None:
        vision.check(request.request_id, prompt, request.images)


def check_weights(
    shapes: Mapping[str, tuple[int, ...]], new: Mapping[str, torch.Tensor], *, optional: frozenset[str]
) -> None:
    """Refuse weights that are not the model's.

    Args:
        shapes: of all the model's parameters.
        optional: names that may be left out, being tied to others.

    Raises:
        ValueError: unknown or missing names, or another shape.
    """
    unknown = sorted(new.keys() - shapes.keys() - optional)
    missing = sorted(shapes.keys() - new.keys() - optional)
    if unknown or missing:
        raise ValueError(f"weights do not match the model: unknown names {unknown[:3]}, missing names {missing[:3]}")
    for name, tensor in new.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}: the model has {shapes[name]}")
