"""The weights that an engine runs, kept beside it, so that an update may say only what is new."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.errors import WrongBaseError
from gcore_rollout.weight_sync.adapters import AdapterWeights, check_adapters, merged
from gcore_rollout.weight_sync.delta import WeightDelta, apply_delta
from gcore_rollout.weight_sync.layout import host_copy


@dataclass(frozen=True, kw_only=True, eq=False)
class FullWeights:
    """All weights of one version."""

    version: int
    tensors: Iterable[tuple[str, torch.Tensor]]
    """Hugging Face names and full tensors; a tensor may change once the next is asked for."""


WeightUpdate = FullWeights | WeightDelta | AdapterWeights


class WeightMirror:
    """A copy in the host's memory of the weights that an engine runs, and their version.

    It takes updates in any form and hands the engine the full tensors. Adapters are merged onto the last full weights
    (or what deltas made of them), never onto what was merged before; merged weights are not kept.

    If the engine refuses an update or fails at it, the mirror goes back to what it was, so a sender may try again.
    Every update gives the engine all tensors, so the next one makes good whatever a failed one left in it.

    It takes the memory of the weights once, and twice while it takes a full update.

    Args:
        engine: from now on, updated through this object alone.
        weights: that the engine runs; None: unknown, and then the first update has to be a full one.
    """

    def __init__(self, engine: Engine, weights: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        self._engine = engine
        self._base = {name: host_copy(tensor) for name, tensor in weights or ()}
        self._base_version = None if weights is None else engine.weight_version
        self._adapters: AdapterWeights | None = None
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int | None:
        """Of the weights that are here; None: there are none."""
        return self._base_version if self._adapters is None else self._adapters.version

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and full tensors of the present version; not to be written to, and valid until the next update."""
        return iter(self._base.items()) if self._adapters is None else merged(self._base, self._adapters)

    async def apply(self, *updates: WeightUpdate) -> None:
        """Take updates, one on top of the other, and then give the engine the weights that they make, once.

        What was begun is brought to its end even if the caller is cancelled meanwhile.

        Raises:
            WrongBaseError: an update builds on weights that are not here; its ``version`` says which are.
            ValueError: a version that is not above the one before, or an update that does not fit the weights.
        """
        if not updates:
            return
        task = asyncio.create_task(self._apply(updates))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.shield(task)

    async def _apply(self, updates: Sequence[WeightUpdate]) -> None:
        async with self._lock:
            before, version_before = (self._base, self._base_version, self._adapters), self._engine.weight_version
            changes_back: list[tuple[dict[str, torch.Tensor], WeightDelta]] = []
            try:
                for update in updates:
                    change_back = self._take(update)
                    if change_back is not None:
                        changes_back.append((self._base, change_back))
                await self._engine.update_weights(iter(self), version=updates[-1].version)
            except BaseException:
                # Otherwise it failed after it had taken the weights.
                if self._engine.weight_version == version_before:
                    for base, change_back in reversed(changes_back):
                        apply_delta(base, change_back, version=change_back.base_version)
                    self._base, self._base_version, self._adapters = before
                raise

    def _take(self, update: WeightUpdate) -> WeightDelta | None:
        """The delta that takes back what was changed in place, if something was."""
        if self.version is not None and update.version <= self.version:
            raise ValueError(f"version is {update.version}; expected a version above the current {self.version}")
        match update:
            case FullWeights():
                self._base = {name: host_copy(tensor) for name, tensor in update.tensors}
                self._adapters = None
                self._base_version = update.version
                return None
            case WeightDelta():
                if self._base_version is None or self._adapters is not None:
                    raise WrongBaseError(
                        f"the delta to version {update.version} changes version {update.base_version}, but "
                        f"{'nothing is' if self.version is None else f'adapters of version {self.version} are'} here: "
                        "send a full update",
                        version=None,
                    )
                change_back = apply_delta(self._base, update, version=self._base_version)
                self._base_version = update.version
                return change_back
            case AdapterWeights():
                if update.base_version != self._base_version:
                    here = "nothing" if self._base_version is None else f"version {self._base_version}"
                    raise WrongBaseError(
                        f"the adapters of version {update.version} belong to version {update.base_version}, but {here} "
                        "is here: send a full update",
                        version=self._base_version,
                    )
                check_adapters(self._base, update)
                copies = {name: host_copy(tensor) for name, tensor in update.tensors.items()}
                self._adapters = replace(update, tensors=copies)
                return None
