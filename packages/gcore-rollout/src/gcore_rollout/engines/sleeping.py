"""The sleep of engines: memory of weights, and of keys and values, freed and taken again, together or one by one.

This module does not import torch.
"""

import ctypes
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import Literal

from gcore_rollout.engines.protocol import EngineStats
from gcore_rollout.errors import RolloutError

Control = Literal["pause", "resume", "sleep", "discard", "wake", "wake_weights", "wake_cache"]
"""A call that changes the state of an engine; discard is to sleep without keeping the weights."""


def return_free_memory() -> None:
    """Return the free pages of the C heap to the system, where its C library can (glibc); else do nothing.

    Freed tensors on CPU, and buffers on the way of those on a GPU, otherwise stay in the process, up to 32 MiB each.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class SleepingEngine(ABC):
    """Keeps what of an engine is asleep, and refuses calls in an order that would leave it without weights."""

    _version: int
    _is_asleep = False
    """Whether the keys and values are asleep, with the weights or alone."""
    _are_weights_asleep = False
    _has_weights = True
    """False from a `sleep` that dropped them to the next update."""

    async def sleep(self, *, keep_weights: bool = True) -> None:
        async with self._controlling():
            if self._are_weights_asleep:
                return
            stats = self.stats()
            running, waiting = stats.num_running, stats.num_waiting
            if running or waiting:
                raise RolloutError(
                    f"{running} samples are running and {waiting} are waiting: abort them or let them finish before "
                    "sleep"
                )
            # First, so that no sample starts meanwhile.
            before, self._is_asleep = self._is_asleep, True
            keeps = keep_weights and self._has_weights
            try:
                await self._control("sleep" if keeps else "discard")
            except Exception:
                self._is_asleep = before
                self._start()
                raise
            self._are_weights_asleep, self._has_weights = True, keeps
            return_free_memory()

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        async with self._controlling():
            wakes_weights, wakes_cache = weights and self._are_weights_asleep, cache and self._is_asleep
            if wakes_cache and self._are_weights_asleep and not weights:
                raise RolloutError("weights are asleep: wake(cache=False) has to come before wake(weights=False)")
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
    def stats(self) -> EngineStats: ...

    @abstractmethod
    def _controlling(self) -> AbstractAsyncContextManager[None]:
        """Guard a call that changes the state of the engine."""

    @abstractmethod
    async def _control(self, name: Control) -> None:
        """Do what a call needs besides a note of it: free memory or allocate it, notify a server."""

    @abstractmethod
    def _start(self) -> None:
        """Start waiting samples if there is capacity."""
