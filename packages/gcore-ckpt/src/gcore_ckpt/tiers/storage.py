"""The tiers of a `TieredCheckpointer` as one storage: a save goes to the first that is due, a load reads the newest."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from gcore_ckpt.errors import CheckpointNotFoundError
from gcore_ckpt.storage import StepFiles, Storage
from gcore_ckpt.storage.local import open_storage
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.survey import Report, whole_steps
from gcore_ckpt.tiers.tier import Tier

Plan: TypeAlias = Mapping[str, Any]
"""Where to load from, as JSON: `tier` (its number), `step`, and `places`, None where every machine has all files."""


@dataclass(frozen=True)
class OpenTier:
    """A tier and its storage."""

    tier: Tier
    storage: Storage


class TieredStorage:
    """A `Storage` over several: the name of an attempt starts with the number of the tier that it is for."""

    max_file_bytes = NodeStorage.max_file_bytes  # held whole in memory on its way to the next tier

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.open_tiers = [
            OpenTier(
                tier,
                open_storage(tier.path)
                if tier.replicas is None
                else NodeStorage(tier.path, tier.replicas),
            )
            for tier in tiers
        ]
        first = self.open_tiers[0].storage
        self.node = first if isinstance(first, NodeStorage) else None
        self.forced: set[int] = set()
        """Steps that go to all tiers, whatever their `every`."""

    def __str__(self) -> str:
        return ", ".join(str(open_tier.storage) for open_tier in self.open_tiers)

    def due(self, step: int) -> list[OpenTier]:
        """Return the tiers that a step goes to, the first of which it is saved to and then copied from."""
        return [
            open_tier
            for open_tier in self.open_tiers
            if step in self.forced or step % open_tier.tier.every == 0
        ]

    def steps(self) -> list[int]:
        """Return the committed steps of all tiers, ascending (root; those on the machines once it may write)."""
        return sorted(
            set[int]().union(*(open_tier.storage.steps() for open_tier in self.open_tiers))
        )

    def reported_steps(self, report: Sequence[Report]) -> list[list[int]]:
        """Return the committed steps of each tier, from what `NodeStorage.report` returned on every rank (root)."""
        return [
            sorted(
                whole_steps(report) if open_tier.storage is self.node else open_tier.storage.steps()
            )
            for open_tier in self.open_tiers
        ]

    def plan(
        self, reports: Sequence[Report], step: int | str, *, above_tier: int = -1
    ) -> list[Plan]:
        """Return, for each rank, where to load a step from: the first tier above a number that has it (root)."""
        steps = self.reported_steps(reports)
        all_steps = sorted(set[int]().union(*steps))
        if not all_steps:
            raise CheckpointNotFoundError(f"{self} hold no committed step")
        step_number = all_steps[-1] if step == "latest" else step
        holders = [
            number
            for number, numbers in enumerate(steps)
            if step_number in numbers and number > above_tier
        ]
        tier = holders[0] if holders else None
        if tier is None or not isinstance(step_number, int):
            raise CheckpointNotFoundError(
                f"{self} hold no step {step!r}; their committed steps are {all_steps}"
            )
        plan = {"tier": tier, "step": step_number, "steps": steps, "places": None}
        if self.node is None or tier:
            return [plan] * len(reports)
        sources = self.node.find_sources(whole_steps(reports)[step_number])
        for rank_sources in sources:
            if any(rank >= 0 for _, rank in rank_sources.values()):
                return [plan | {"places": files} for files in sources]
        return [plan] * len(reports)

    def acquire(self) -> None:
        with ExitStack() as undo:
            for open_tier in self.open_tiers:
                open_tier.storage.acquire()
                undo.callback(open_tier.storage.release)
            undo.pop_all()

    def release(self) -> None:
        for open_tier in self.open_tiers:
            open_tier.storage.release()

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        """Open a step in the first tier that has it; those on the machines once they may be written to."""
        open_tier = next(
            (open_tier for open_tier in self.open_tiers if step in open_tier.storage.steps()),
            self.open_tiers[0],
        )
        return open_tier.storage.open_step(step)

    def begin(self, step: int) -> str:
        open_tier = self.due(step)[0]
        return f"{self.open_tiers.index(open_tier)}/{open_tier.storage.begin(step)}"

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        storage, inner = self._of(attempt)
        storage.write_file(inner, name, parts)

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        storage, inner = self._of(attempt)
        storage.link_file(inner, step, file, name)

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        storage, inner = self._of(attempt)
        storage.commit(inner, step, index, sizes)

    def abort(self, attempt: str) -> None:
        storage, inner = self._of(attempt)
        storage.abort(inner)

    def remove(self, step: int) -> None:
        for open_tier in self.open_tiers:
            if step in open_tier.storage.steps():
                open_tier.storage.remove(step)

    def set_aside(self, steps: Sequence[int]) -> None:
        for open_tier in self.open_tiers:
            here = set(open_tier.storage.steps())
            open_tier.storage.set_aside([step for step in steps if step in here])

    def _of(self, attempt: str) -> tuple[Storage, str]:
        number, _, inner = attempt.partition("/")
        return self.open_tiers[int(number)].storage, inner
