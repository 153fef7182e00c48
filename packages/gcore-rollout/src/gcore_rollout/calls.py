"""What the in-process engines share: calls, the line in which their samples wait, and checks at the door."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from gcore_rollout.errors import RequestError
from gcore_rollout.types import Completion, Request


@dataclass(eq=False)
class Call:
    """One `generate` call: where its completions go, and how many are still to come."""

    pending: int
    finished: asyncio.Queue[Completion | Exception] = field(default_factory=asyncio.Queue)
    abandoned: bool = False

    async def completions(self) -> AsyncGenerator[Completion]:
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


@dataclass(eq=False)
class _Waiting:
    """Samples ``next_index..n-1`` of a request."""

    call: Call
    request: Request
    next_index: int = 0


class WaitingLine:
    """Samples that have not started, first come, first served."""

    def __init__(self) -> None:
        self._line: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return sum(w.request.n - w.next_index for w in self._line)

    def join(self, requests: Sequence[Request]) -> Call:
        """A new call, its samples at the end of the line."""
        call = Call(pending=sum(r.n for r in requests))
        self._line.extend(_Waiting(call, r) for r in requests)
        return call

    def admit(self, room: int) -> Iterator[tuple[Call, Request, range]]:
        """Take up to ``room`` samples out of the line, as runs of one request's sample indices."""
        while self._line and room > 0:
            first = self._line[0]
            indices = range(first.next_index, min(first.request.n, first.next_index + room))
            first.next_index = indices.stop
            room -= len(indices)
            if indices.stop == first.request.n:
                self._line.popleft()
            yield first.call, first.request, indices

    def drop_abandoned(self) -> None:
        """Remove the samples of calls that nobody waits for any more."""
        if any(w.call.abandoned for w in self._line):
            self._line = deque(w for w in self._line if not w.call.abandoned)

    def clear(self) -> set[Call]:
        """Remove everything; the calls it belonged to."""
        calls = {w.call for w in self._line}
        self._line.clear()
        return calls


def check_request(request: Request, *, max_length: int, vocab_size: int) -> None:
    """Refuse a request that the model cannot take.

    Raises:
        RequestError: too many tokens in all, or a prompt token outside the vocabulary.
    """
    prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
    need = len(prompt) + max_tokens
    if need > max_length:
        raise RequestError(
            f"request {request.request_id!r} needs {len(prompt)} prompt + {max_tokens} completion tokens = {need}: "
            f"the model takes at most {max_length}"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise RequestError(
            f"request {request.request_id!r} has prompt tokens from {min(prompt)} to {max(prompt)}: "
            f"the model knows 0 to {vocab_size - 1}"
        )


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
