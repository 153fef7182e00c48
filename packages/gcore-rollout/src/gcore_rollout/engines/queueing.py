"""Engines that queue samples and generate them on this event loop or elsewhere, and the checks that they share.

This module does not import torch.
"""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.endings import StopStrings
from gcore_rollout.engines.protocol import (
    ClosableEngine,
    Completion,
    EngineStats,
    FinishReason,
    Request,
    RequestT,
    SampleT,
)
from gcore_rollout.engines.sleeping import Control as Control, SleepingEngine
from gcore_rollout.errors import EngineDiedError, RequestError, RolloutError

if TYPE_CHECKING:
    import torch

    from gcore_rollout.images.vision_processor import VisionProcessor


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def sample_seeds(seed: int, indices: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a 64-bit seed for each sample of a request, shape [n]."""
    base = np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)
    return splitmix64(splitmix64(base + _GOLDEN) + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the uniform number in (0, 1) of each sample (by its seed, shape [B]) at its position, shape [B]."""
    bits = splitmix64(seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(eq=False)
class Call(Generic[SampleT]):
    """One `generate` call: the queue of its completions, and how many are still to come."""

    pending: int
    finished: asyncio.Queue[SampleT | Exception] = field(default_factory=asyncio.Queue)
    abandoned: bool = False

    async def completions(self) -> AsyncGenerator[SampleT]:
        """Yield each completion as it is finished; a call left early is marked as abandoned."""
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
class Sample(Generic[RequestT, SampleT]):
    """One of a request's samples, from the queue to its completion."""

    call: Call[SampleT]
    request: RequestT
    index: int
    shares_prompt: bool = False
    """Whether the sample before it in the queue starts from the same tokens."""

    def abort(self) -> None:
        """Hand it over as aborted, without anything new."""
        self.call.finished.put_nowait(self.request.aborted(self.index))

    @cached_property
    def prefix(self: "Sample") -> Completion:
        """The completion that it continues, which may be empty."""
        return self.request.aborted(self.index)

    @property
    def start_token_ids(self: "Sample") -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.prefix.token_ids.tolist())

    @property
    def prefix_length(self: "Sample") -> int:
        return self.prefix.token_ids.size

    @property
    def generator_seed(self: "Sample") -> int:
        """The seed, from 0 to 2**63 - 1, for engines whose generators start with every request.

        It depends on the length of the prefix, because with the first seed the next token would be drawn with the
        random numbers of the first one.
        """
        own = int(sample_seeds(self.request.seed, np.array([self.index]))[0])
        if self.prefix_length:
            own = int(sample_seeds(own, np.array([self.prefix_length]))[0])
        return own >> 1

    def finish(
        self: "Sample",
        token_ids: NDArray[np.int64],
        log_probs: NDArray[np.float32],
        weight_versions: NDArray[np.int32],
        reason: FinishReason,
    ) -> None:
        """Hand over the completion: the tokens of the prefix, then those given, all of shape [T]."""
        before = self.prefix
        self.call.finished.put_nowait(
            replace(
                before,
                # Completions that come back from storage may have other types.
                token_ids=np.concatenate([before.token_ids, token_ids]).astype(np.int64),
                log_probs=np.concatenate([before.log_probs, log_probs]).astype(np.float32),
                weight_versions=np.concatenate([before.weight_versions, weight_versions]).astype(np.int32),
                finish_reason=reason,
            )
        )


SampleFilter = Callable[[Sample[RequestT, SampleT]], bool]


class QueueingEngine(SleepingEngine, ClosableEngine, ABC, Generic[RequestT, SampleT]):
    """An engine that queues its waiting samples, first come, first served; the running ones are the subclass's."""

    def __init__(self) -> None:
        self._waiting: deque[Sample[RequestT, SampleT]] = deque()
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._version = 0
        self._is_paused = False

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_running=self._num_running(),
            num_waiting=len(self._waiting),
            weight_version=self._version,
        )

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        self._check_open(tuple((r.request_id, i) for r in requests for i in r.sample_indices))
        for request in requests:
            self._check_request(request)
        call = self._enqueue(requests)
        self._start()
        try:
            async with aclosing(call.completions()) as completions:
                async for completion in completions:
                    yield completion
        finally:
            if call.abandoned:
                self._remove_waiting(lambda sample: sample.call is call)
                self._remove_running(lambda sample: sample.call is call, as_aborted=False)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self._check_open()
        ids = None if request_ids is None else frozenset(request_ids)

        def is_meant(sample: Sample[RequestT, SampleT]) -> bool:
            return ids is None or sample.request.request_id in ids

        for sample in self._remove_waiting(is_meant):
            sample.abort()
        await self._abort_running(is_meant)

    async def pause(self) -> None:
        async with self._controlling():
            self._is_paused = True
            await self._control("pause")

    async def resume(self) -> None:
        async with self._controlling():
            await self._control("resume")
            self._is_paused = False
        self._start()

    @asynccontextmanager
    async def _controlling(self) -> AsyncGenerator[None]:
        """Guard a call that changes the state of the engine; this one only refuses those of a closed or dead one."""
        self._check_open()
        yield

    def _check_update(self, version: int) -> None:
        self._check_open()
        if self._are_weights_asleep:
            raise RolloutError("the engine is asleep: wake it before update_weights")
        if version <= self._version:
            raise ValueError(f"version is {version}; expected a version above the current {self._version}")

    def _has_taken(self, version: int) -> None:
        """Note that the weights are now those of this version."""
        self._version, self._has_weights = version, True

    def _enqueue(self, requests: Sequence[RequestT]) -> Call[SampleT]:
        """Append the samples of a new call; of each request, those that continue others come first."""
        call: Call[SampleT] = Call(pending=sum(len(r.sample_indices) for r in requests))
        for request in requests:
            new = [index for index in request.sample_indices if index not in request.continued]
            for index in (*request.continued, *new):
                shares = index in new[1:]
                self._waiting.append(Sample(call=call, request=request, index=index, shares_prompt=shares))
        return call

    def _remove_waiting(self, which: SampleFilter[RequestT, SampleT]) -> list[Sample[RequestT, SampleT]]:
        removed = [sample for sample in self._waiting if which(sample)]
        self._waiting = deque(sample for sample in self._waiting if not which(sample))
        return removed

    def _fail(self, error: Exception) -> None:
        """End all calls with this error; an `EngineDiedError` names the unfinished samples of each."""
        samples = self._remove_waiting(lambda _: True) + self._remove_running(lambda _: True, as_aborted=False)
        for call in {sample.call for sample in samples}:
            if isinstance(error, EngineDiedError):
                unfinished = tuple((s.request.request_id, s.index) for s in samples if s.call is call)
                error = EngineDiedError(error.reason, unfinished=unfinished)
            call.finished.put_nowait(error)

    async def _abort_running(self, which: SampleFilter[RequestT, SampleT]) -> None:
        self._remove_running(which, as_aborted=True)

    async def _control(self, name: Control) -> None:
        """Do what a call needs besides a note of it: free memory or allocate it, notify a server."""

    @abstractmethod
    def _check_request(self, request: RequestT) -> None:
        """Refuse a request that the model cannot serve, by a `RequestError`."""

    @abstractmethod
    def _num_running(self) -> int: ...

    @abstractmethod
    def _start(self) -> None:
        """Start waiting samples if there is capacity."""

    @abstractmethod
    def _remove_running(
        self, which: SampleFilter[RequestT, SampleT], *, as_aborted: bool
    ) -> list[Sample[RequestT, SampleT]]:
        """Stop running samples and return them; ``as_aborted`` hands over the tokens that they have."""


class TokenEngine(QueueingEngine[Request, Completion]):
    """An engine of a language model.

    Args:
        max_length: largest number of tokens of prompt and completion.
        max_num_seqs: largest number of running samples.
        vision: the image processor of the model; None: it takes no images.
    """

    def __init__(
        self, *, max_length: int, vocab_size: int, max_num_seqs: int, vision: "VisionProcessor | None" = None
    ) -> None:
        check_max_num_seqs(max_num_seqs)
        super().__init__()
        self._max_length = max_length
        self._vocab_size = vocab_size
        self._max_num_seqs = max_num_seqs
        self._vision = vision

    _stop_strings = StopStrings()

    def _check_request(self, request: Request) -> None:
        self._stop_strings.check(request)
        if request.images and self._vision is None:
            raise RequestError(
                f"request {request.request_id!r} has {len(request.images)} images; expected none: only the hf and vllm "
                "engines take images, with a vision-language model"
            )
        prompt, max_tokens = request.prompt_token_ids, request.sampling.max_tokens
        need = len(prompt) + max_tokens
        if need > self._max_length:
            raise RequestError(
                f"request {request.request_id!r} needs {len(prompt)} prompt + {max_tokens} completion tokens = {need}; "
                f"expected at most {self._max_length}, which the model takes"
            )
        prefixes = [c.token_ids for c in request.prefixes if c.token_ids.size]
        for name, tokens in (("prompt", np.array(prompt)), *(("prefix", t) for t in prefixes)):
            if not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
                raise RequestError(
                    f"request {request.request_id!r} has {name} tokens from {tokens.min()} to {tokens.max()}; "
                    f"expected 0 to {self._vocab_size - 1}, which the model knows"
                )
        if request.images and self._vision is not None:
            self._vision.check(request.request_id, prompt, request.images)

    def _admitted(self) -> list[list[Sample]]:
        """Remove from the queue what can start now, in lists of samples that start from the same tokens."""
        groups: list[list[Sample]] = []
        for _ in range(min(self._max_num_seqs - self._num_running(), len(self._waiting))):
            sample = self._waiting.popleft()
            if groups and sample.shares_prompt:
                groups[-1].append(sample)
            else:
                groups.append([sample])
        return groups


class InProcessEngine(TokenEngine):
    """An engine whose steps run on the event loop, so that every other method acts between two of them."""

    _HOW_TO_OPEN = "make a new one with from_pretrained"
    _driver: "asyncio.Task[None] | None" = None

    def _stop(self) -> None:
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail(RolloutError("the engine was closed while generating"))

    def _start(self) -> None:
        if self._has_work() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        try:
            while self._has_work():
                self._step()
                # A message that came meanwhile is read in the first turn of the event loop, and acts in the second.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _has_work(self) -> bool:
        return not (self._is_paused or self._is_asleep) and bool(self._waiting or self._num_running())

    @abstractmethod
    def _step(self) -> None:
        """Admit waiting samples that fit, sample a token for each running one, and hand over finished ones."""


def check_max_num_seqs(max_num_seqs: int) -> None:
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}; expected at least 1")


def check_weights(
    shapes: Mapping[str, tuple[int, ...]], new: "Mapping[str, torch.Tensor]", *, optional: frozenset[str]
) -> None:
    """Refuse unknown and missing names and other shapes by a `ValueError`; ``optional`` names may be left out."""
    unknown = sorted(new.keys() - shapes.keys() - optional)
    missing = sorted(shapes.keys() - new.keys() - optional)
    if unknown or missing:
        raise ValueError(f"weights do not match the model: unknown names {unknown[:3]}, missing names {missing[:3]}")
    for name, tensor in new.items():
        if name in shapes and tuple(tensor.shape) != shapes[name]:
            raise ValueError(f"shape of weight {name!r} is {tuple(tensor.shape)}; expected {shapes[name]}")


def checked_weights(
    own: "Mapping[str, torch.Tensor]", weights: "Iterable[tuple[str, torch.Tensor]]", *, at_once: bool
) -> "Iterator[tuple[str, torch.Tensor]]":
    """Yield weights that match the engine's own, by `check_weights`; of tied tensors any one will do.

    Args:
        at_once: check all before the first is yielded, so that all are in memory together; otherwise one by one.
    """
    shapes, new = {name: tuple(tensor.shape) for name, tensor in own.items()}, dict[str, Any]()
    for name, tensor in weights:
        new[name] = tensor if at_once else None
        if not at_once:
            check_weights({n: shapes[n] for n in shapes.keys() & {name}}, {name: tensor}, optional=frozenset())
            yield name, tensor
    pointers = {own[name].data_ptr() for name in new.keys() & own.keys()}
    tied = frozenset(name for name, tensor in own.items() if name not in new and tensor.data_ptr() in pointers)
    held = {name: tensor for name, tensor in new.items() if tensor is not None}
    check_weights({n: shape for n, shape in shapes.items() if at_once or n not in new}, held, optional=tied)
    yield from held.items()
