"""The base of all engines: a queue of samples, sleep and wake, the checks of requests, and what ends a sample.

This module does not import torch. Shapes: B samples, T tokens.
"""

import asyncio
import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import (
    Completion,
    EngineStats,
    FinishReason,
    Request,
    RequestT,
    SampleT,
    check_open,
    sample_keys,
)
from gcore_rollout.errors import EngineDiedError, RequestError, RolloutError

if TYPE_CHECKING:
    import torch

    from gcore_rollout.images.vision_processor import VisionProcessor

_NUM_TOKENS_BEFORE = 8
"""Tokens decoded before a stop string: the first ones of a text may lose a space, or the start of a character."""

Control = Literal["pause", "resume", "sleep", "discard", "wake", "wake_weights", "wake_cache"]
"""A call that changes the state of an engine; discard is to sleep without keeping the weights."""

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
    start = splitmix64(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64) + _GOLDEN)
    return splitmix64(start + (indices.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the uniform number in (0, 1) of each sample (by its seed, shape [B]) at its position, shape [B]."""
    bits = splitmix64(seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


@dataclass(eq=False)
class Call(Generic[SampleT]):
    """One `generate` call: the queue of its completions, and how many are still to come.

    Example:
        >>> call = Call(pending=1)
        >>> call.finished.put_nowait("a sample")
        >>> asyncio.run(anext(call.completions()))
        'a sample'
    """

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
class QueuedSample(Generic[RequestT, SampleT]):
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
    def prefix(self: "QueuedSample") -> Completion:
        """The completion that it continues, which may be empty."""
        return self.request.aborted(self.index)

    @property
    def start_token_ids(self: "QueuedSample") -> tuple[int, ...]:
        return (*self.request.prompt_token_ids, *self.prefix.token_ids.tolist())

    @property
    def prefix_length(self: "QueuedSample") -> int:
        return self.prefix.token_ids.size

    @property
    def generator_seed(self: "QueuedSample") -> int:
        """The seed, from 0 to 2**63 - 1, for engines whose generators start with every request.

        It depends on the length of the prefix, because with the first seed the next token would be drawn with the
        random numbers of the first one.
        """
        seed = int(sample_seeds(self.request.seed, np.array([self.index]))[0])
        if self.prefix_length:
            seed = int(sample_seeds(seed, np.array([self.prefix_length]))[0])
        return seed >> 1

    def finish(
        self: "QueuedSample",
        token_ids: NDArray[np.int64],
        log_probs: NDArray[np.float32],
        weight_versions: NDArray[np.int32],
        reason: FinishReason,
        routed_experts: NDArray[Any] | None = None,
        kept: Sequence[NDArray[np.int32]] = (),
    ) -> None:
        """Hand over the completion: the tokens of the prefix, then those given, all of shape [T].

        ``kept`` are, for each of those given, the tokens among which it was drawn: none for all. Empty: all were drawn
        from all.

        ``routed_experts`` are of all tokens from the prompt's first, [at least P + T - 1, L, K]; those that the prefix
        has stay.
        """
        prefix = self.prefix
        if routed_experts is None:
            routed_experts = prefix.routed_experts
        else:
            num_inputs = len(self.start_token_ids) + token_ids.size - 1
            routed_experts = routed_experts[:num_inputs].astype(np.int16)
            if prefix.routed_experts is not None:
                routed_experts[: len(prefix.routed_experts)] = prefix.routed_experts
        kept_counts = prefix.kept_counts
        kept_ids = prefix.kept_ids
        if kept or kept_counts is not None:
            if kept_counts is None or kept_ids is None:
                kept_counts = np.zeros(self.prefix_length, np.int32)
                kept_ids = kept_counts[:0]
            new_counts = [ids.size for ids in kept] or [0] * token_ids.size
            kept_counts = np.append(kept_counts, new_counts).astype(np.int32)
            kept_ids = np.concatenate([kept_ids, *kept], dtype=np.int32)
        completion = Completion(
            request_id=self.request.request_id,
            index=self.index,
            # Copies; a prefix that comes back from storage may have other types.
            token_ids=np.concatenate([prefix.token_ids, token_ids], dtype=np.int64),
            log_probs=np.concatenate([prefix.log_probs, log_probs], dtype=np.float32),
            weight_versions=np.concatenate(
                [prefix.weight_versions, weight_versions], dtype=np.int32
            ),
            finish_reason=reason,
            routed_experts=routed_experts,
            kept_counts=kept_counts,
            kept_ids=kept_ids,
        )
        self.call.finished.put_nowait(completion)


SampleFilter = Callable[[QueuedSample[RequestT, SampleT]], bool]


class StopStrings:
    """Finds the token with which the text of a sample first has one of the request's stop strings.

    Engines sample tokens and know no text: the tokenizer of the model's folder is loaded when a request needs it.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = folder
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def check(self, request: Request) -> None:
        """Raise a `RequestError` if the request has stop strings, and the model's folder has no tokenizer."""
        if not request.sampling.stop or self._tokenizer is not None:
            return
        from transformers import AutoTokenizer

        reason = "it was not made from a folder"
        if self._folder is not None:
            # Without files transformers would make an empty one.
            if any(Path(self._folder).glob("tokenizer*")):
                self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
                return
            reason = f"{self._folder} has no file tokenizer*"
        raise RequestError(
            f"request {request.request_id!r} has stop={request.sampling.stop}; expected none, or an engine whose model "
            f"folder has a tokenizer ({reason})"
        )

    def find_end(
        self,
        new_ids: Sequence[int],
        stop: Sequence[str],
        *,
        before: Sequence[Sequence[int] | NDArray[np.int64]] = (),
    ) -> int | None:
        """Return how many new tokens of a sample there are up to the one that completes a stop string; None: none does.

        ``before`` are its earlier tokens, in one part or several, which have no stop string.
        """
        if not stop:
            return None
        # Each token is a byte or more.
        window = max(len(string.encode()) for string in stop) + _NUM_TOKENS_BEFORE
        tokens: list[int] = []
        for part in reversed(before):
            num_missing = window - len(tokens)
            if num_missing > 0:
                tokens = list(part[-num_missing:]) + tokens
        num_before = len(tokens)
        tokens += new_ids
        for end in range(1, len(new_ids) + 1):
            last = num_before + end
            if self._is_stopped(tokens[max(0, last - window) : last], stop):
                return end
        return None

    def _is_stopped(self, last_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """Return whether the last of some tokens completes a stop string."""
        token = int(last_ids[-1])
        if token not in self._texts:
            # Twice, because decoders may drop the space before the first one.
            self._texts[token] = self._decode([token, token])
        text = self._texts[token]
        # Most tokens cannot end a stop string; of one that is no whole character that is unknown.
        may_stop = "\ufffd" in text or any(string[-1] in text for string in stop)
        if not may_stop:
            return False
        text = self._decode(last_ids)
        return any(string in text for string in stop)

    def _decode(self, token_ids: Sequence[int]) -> str:
        ids = [int(token) for token in token_ids]
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


@dataclass(kw_only=True)
class TokenLimits:
    """The limits of the requests that the engine of a language model takes.

    Example:
        >>> request = Request(request_id="a", prompt_token_ids=(40, 41), sampling=SamplingParams(max_tokens=6))
        >>> TokenLimits(max_length=8, vocab_size=128).check(request)  # With one more token: a RequestError.
    """

    max_length: int
    """Largest number of tokens of prompt and completion."""
    vocab_size: int
    vision: "VisionProcessor | None" = None
    """The image processor of the model; None: it takes no images."""
    stop_strings: StopStrings = field(default_factory=StopStrings)

    def check(self, request: Request) -> None:
        """Raise a `RequestError` if the model cannot serve the request."""
        name = f"request {request.request_id!r}"
        self.stop_strings.check(request)
        if request.images and self.vision is None:
            raise RequestError(
                f"{name} has {len(request.images)} images; expected none: only the hf and vllm engines take images, "
                "with a vision-language model"
            )
        prompt = request.prompt_token_ids
        max_tokens = request.sampling.max_tokens
        need = len(prompt) + max_tokens
        if need > self.max_length:
            raise RequestError(
                f"{name} needs {len(prompt)} prompt + {max_tokens} completion tokens = {need}; "
                f"expected at most {self.max_length}, which the model takes"
            )
        self._check_tokens(name, "prompt", np.array(prompt))
        for prefix in request.prefixes:
            if prefix.token_ids.size:
                self._check_tokens(name, "prefix", prefix.token_ids)
        if request.images and self.vision is not None:
            self.vision.check(request.request_id, prompt, request.images, request.image_starts)

    def _check_tokens(self, name: str, part: str, tokens: NDArray[np.int64]) -> None:
        if not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise RequestError(
                f"{name} has {part} tokens from {tokens.min()} to {tokens.max()}; "
                f"expected 0 to {self.vocab_size - 1}, which the model knows"
            )


class QueueingEngine(ABC, Generic[RequestT, SampleT]):
    """The base of engines: it queues samples, first come, first served, and steps on the event loop.

    A new engine implements `_check_request`, `_step`, `_num_running`, `_remove_running`, `update_weights` and `close`,
    and `_control` if it can free memory. An engine whose steps are elsewhere replaces `_start` or `_drive`.

    Args:
        max_num_seqs: largest number of running samples.

    Example:
        >>> sorted(QueueingEngine.__abstractmethods__)
        ['_check_request', '_num_running', '_remove_running', 'close', 'update_weights']
    """

    _HOW_TO_OPEN: ClassVar[str] = "make a new one with from_pretrained"
    """Advice for errors once the engine is closed."""

    def __init__(self, *, max_num_seqs: int) -> None:
        check_max_num_seqs(max_num_seqs)
        self._max_num_seqs = max_num_seqs
        self._waiting: deque[QueuedSample[RequestT, SampleT]] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._version = 0
        self._is_closed = False
        self._death: str | None = None
        self._is_paused = False
        self._is_asleep = False
        """Whether the keys and values are asleep, with the weights or alone."""
        self._are_weights_asleep = False
        self._has_weights = True
        """False from a `sleep` that dropped them to the next update."""

    @property
    def weight_version(self) -> int:
        return self._version

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_running=self._num_running(),
            num_slots=self._max_num_seqs,
            num_waiting=len(self._waiting),
            weight_version=self._version,
        )

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        self._check_open(sample_keys(requests))
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
        ids = frozenset(request_ids or ())

        def is_meant(sample: QueuedSample[RequestT, SampleT]) -> bool:
            return request_ids is None or sample.request.request_id in ids

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

    async def sleep(self, *, keep_weights: bool = True) -> None:
        async with self._controlling():
            if self._are_weights_asleep:
                return
            running = self._num_running()
            if running or self._waiting:
                raise RolloutError(
                    f"{running} samples are running and {len(self._waiting)} are waiting: abort them or let them "
                    "finish before sleep"
                )
            before = self._is_asleep
            self._is_asleep = True  # First, so that no sample starts meanwhile.
            keeps = keep_weights and self._has_weights
            try:
                await self._control("sleep" if keeps else "discard")
            except Exception:
                self._is_asleep = before
                self._start()
                raise
            self._are_weights_asleep = True
            self._has_weights = keeps
            return_free_memory()

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        async with self._controlling():
            wakes_weights = weights and self._are_weights_asleep
            wakes_cache = cache and self._is_asleep
            if wakes_cache and self._are_weights_asleep and not weights:
                raise RolloutError(
                    "weights are asleep: wake(cache=False) has to come before wake(weights=False)"
                )
            if wakes_cache and not self._has_weights:
                raise RolloutError(
                    "weights were dropped by sleep(keep_weights=False): wake(cache=False) and update_weights have to "
                    "come before the cache wakes"
                )
            if wakes_weights:
                await self._control("wake" if wakes_cache else "wake_weights")
                self._are_weights_asleep = False
            elif wakes_cache:
                await self._control("wake_cache")
            if wakes_cache:
                self._is_asleep = False
        self._start()

    @abstractmethod
    async def update_weights(
        self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> None:
        """See `Engine`: call `_check_update` before, and `_has_taken` after the new weights are in place."""

    @abstractmethod
    async def close(self) -> None:
        """See `Engine`: call `_stop`, and free the model."""

    def _check_open(self, unfinished: tuple[tuple[str, int], ...] = ()) -> None:
        """Refuse a call of a closed or dead engine; ``unfinished`` are its samples as (request id, index)."""
        check_open(
            self._is_closed, self._death, how_to_open=self._HOW_TO_OPEN, unfinished=unfinished
        )

    def _stop(self) -> None:
        """Refuse later calls, and end those in flight by a `RolloutError`."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
        self._fail(RolloutError("the engine was closed while generating"))

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
            raise ValueError(
                f"version is {version}; expected a version above the current {self._version}"
            )

    def _has_taken(self, version: int) -> None:
        """Note that the weights are now those of this version."""
        self._version = version
        self._has_weights = True

    def _enqueue(self, requests: Sequence[RequestT]) -> Call[SampleT]:
        """Append the samples of a new call; of each request, those that continue others come first."""
        call: Call[SampleT] = Call(pending=sum(len(r.sample_indices) for r in requests))
        for request in requests:
            new = [
                index for index in request.sample_indices if index not in request.continued_indices
            ]
            for index in chain(request.continued_indices, new):
                shares = index in new[1:]
                self._waiting.append(
                    QueuedSample(call=call, request=request, index=index, shares_prompt=shares)
                )
        return call

    def _pop_groups(self) -> list[list[QueuedSample[RequestT, SampleT]]]:
        """Remove from the queue what can start now, in lists of samples that start from the same tokens."""
        groups: list[list[QueuedSample[RequestT, SampleT]]] = []
        for _ in range(min(self._max_num_seqs - self._num_running(), len(self._waiting))):
            sample = self._waiting.popleft()
            if groups and sample.shares_prompt:
                groups[-1].append(sample)
            else:
                groups.append([sample])
        return groups

    def _remove_waiting(
        self, which: SampleFilter[RequestT, SampleT]
    ) -> list[QueuedSample[RequestT, SampleT]]:
        removed = [sample for sample in self._waiting if which(sample)]
        self._waiting = deque(sample for sample in self._waiting if not which(sample))
        return removed

    def _fail(self, error: Exception) -> None:
        """End all calls with this error; an `EngineDiedError` names the unfinished samples of each."""
        samples = self._remove_waiting(lambda _: True) + self._remove_running(
            lambda _: True, as_aborted=False
        )
        for call in {sample.call for sample in samples}:
            if isinstance(error, EngineDiedError):
                unfinished = tuple(
                    (s.request.request_id, s.index) for s in samples if s.call is call
                )
                error = EngineDiedError(error.reason, unfinished=unfinished)
            call.finished.put_nowait(error)

    async def _abort_running(self, which: SampleFilter[RequestT, SampleT]) -> None:
        self._remove_running(which, as_aborted=True)

    async def _control(self, name: Control) -> None:
        """Do what a call needs besides a note of it: free memory or allocate it, notify a server."""

    def _has_work(self) -> bool:
        return not (self._is_paused or self._is_asleep) and bool(
            self._waiting or self._num_running()
        )

    def _start(self) -> None:
        """Start to work on samples, unless a task works on them already."""
        if self._has_work() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """Do steps until no sample is left; every other method acts between two of them."""
        try:
            while self._has_work():
                self._step()
                # A message that came meanwhile is read in the first turn of the event loop, and acts in the second.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    def _step(self) -> None:
        """Start waiting samples (`_pop_groups`), sample a token of each running one, and hand over finished ones.

        Engines of images, with a `_drive` of their own, and of servers, with a `_start` of theirs, have no steps.
        """
        raise NotImplementedError

    @abstractmethod
    def _check_request(self, request: RequestT) -> None:
        """Refuse a request that the model cannot serve, by a `RequestError`."""

    @abstractmethod
    def _num_running(self) -> int: ...

    @abstractmethod
    def _remove_running(
        self, which: SampleFilter[RequestT, SampleT], *, as_aborted: bool
    ) -> list[QueuedSample[RequestT, SampleT]]:
        """Stop running samples and return them; ``as_aborted`` hands over the tokens that they have."""


def return_free_memory() -> None:
    """Return the free pages of the C heap to the system, where its C library can (glibc); else do nothing.

    Freed tensors on CPU, and buffers on the way of those on a GPU, otherwise stay in the process, up to 32 MiB each.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def check_max_num_seqs(max_num_seqs: int) -> None:
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}; expected at least 1")
