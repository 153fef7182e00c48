"""Engines in front of another one: the calls that are handed on as they are."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, cast

from gcore_rollout.engine import Engine, EngineStats
from gcore_rollout.types import RequestT, SampleT
from gcore_rollout.weight_report import Digests, HeldWeights, check_weights, report_weights

if TYPE_CHECKING:
    import torch


class ForwardingEngine(ABC):
    """Hands on the calls of `Engine` that are no more than a name and arguments; the others are the subclass's."""

    @property
    def weight_version(self) -> int:
        """See `Engine.weight_version`."""
        return self.stats().weight_version

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """See `Engine.abort`."""
        await self._call("abort", None if request_ids is None else tuple(request_ids))

    async def pause(self) -> None:
        """See `Engine.pause`."""
        await self._call("pause")

    async def resume(self) -> None:
        """See `Engine.resume`."""
        await self._call("resume")

    async def sleep(self) -> None:
        """See `Engine.sleep`."""
        await self._call("sleep")

    async def wake(self) -> None:
        """See `Engine.wake`."""
        await self._call("wake")

    @abstractmethod
    def stats(self) -> EngineStats:
        """See `Engine.stats`."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any) -> None:
        """Call a method of the engine behind this one, and wait for its end."""


class WrappedEngine(ForwardingEngine, Generic[RequestT, SampleT]):
    """Hands on all calls to an engine in this process, for subclasses that have something to add to some."""

    def __init__(self, engine: Engine[RequestT, SampleT]) -> None:
        self._engine = engine

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return self._engine.stats()

    async def generate(self, requests: Sequence[RequestT]) -> AsyncGenerator[SampleT]:
        """See `Engine.generate`."""
        async with aclosing(cast(AsyncGenerator[SampleT], self._engine.generate(requests))) as completions:
            async for completion in completions:
                yield completion

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        """See `Engine.update_weights`."""
        await self._engine.update_weights(weights, version=version)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights | None:
        """See `ReportsWeights.held_weights`."""
        return await report_weights(self._engine, names)

    async def check_weights(self, digests: Digests) -> None:
        """See `ChecksWeights.check_weights`."""
        await check_weights(self._engine, digests)

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._engine.close()

    async def _call(self, method: str, *arguments: Any) -> None:
        await getattr(self._engine, method)(*arguments)
