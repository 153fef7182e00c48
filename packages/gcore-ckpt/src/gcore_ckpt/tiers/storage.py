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
class Place:
    """A tier and its storage."""

    tier: Tier
    storage: Storage


class TieredStorage:
    """A `Storage` over several: the name of an attempt starts with the number of the tier that it is for."""

    max_file_bytes = NodeStorage.max_file_bytes  # held whole in memory on its way to the next tier

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.places = [
            Place(tier, open_storage(tier.path) if tier.replicas is None else NodeStorage(tier.path, tier.replicas))
            for tier in tiers
        ]
        first = self.places[0].storage
        self.node = first if isinstance(first, NodeStorage) else None
        self.forced: set[int] = set()
        """Steps that go to all tiers, whatever their `every`."""

    def __str__(self) -> str:
        return ", ".join(str(place.storage) for place in self.places)

    def due(self, step: int) -> list[Place]:
        """Return the tiers that a step goes to, the first of which it is saved to and then copied from."""
        return [place for place in self.places if step in self.forced or step % place.tier.every == 0]

    def steps(self) -> list[int]:
        """Return the committed steps of all tiers, ascending (root; those on the machines once it may write)."""
        return sorted({step for place in self.places for step in place.storage.steps()})

    def reported_steps(self, report: Sequence[Report]) -> list[list[int]]:
        """Return the committed steps of each tier, from what `NodeStorage.report` returned on every rank (root)."""
        return [
            sorted(whole_steps(dict(enumerate(report))) if place.storage is self.node else place.storage.steps())
            for place in self.places
        ]

    def plan(self, reports: Sequence[Report], step: int | str, *, above_tier: int = -1) -> list[Plan]:
        """Return, for each rank, where to load a step from: the first tier above a number that has it (root)."""
        steps = self.reported_steps(reports)
        known = sorted({step for numbers in steps for step in numbers})
        if not known:
            raise CheckpointNotFoundError(f"{self} hold no committed step")
        found = known[-1] if step == "latest" else step
        holders = [number for number, numbers in enumerate(steps) if found in numbers and number > above_tier]
        tier = holders[0] if holders else None
        if tier is None or not isinstance(found, int):
            raise CheckpointNotFoundError(f"{self} hold no step {step!r}; their committed steps are {known}")
        plan = {"tier": tier, "step": found, "steps": steps, "places": None}
        if self.node is None or tier:
            return [plan] * len(reports)
        places = self.node.places(whole_steps(dict(enumerate(reports)))[found])
        if all(rank < 0 for files in places for _, rank in files.values()):
            return [plan] * len(reports)
        return [plan | {"places": files} for files in places]

    def acquire(self) -> None:
        with ExitStack() as undo:
            for place in self.places:
                place.storage.acquire()
                undo.callback(place.storage.release)
            undo.pop_all()

    def release(self) -> None:
        for place in self.places:
            place.storage.release()

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        """Open a step in the first tier that has it; those on the machines once they may be written to."""
        place = next((place for place in self.places if step in place.storage.steps()), self.places[0])
        return place.storage.open_step(step)

    def begin(self, step: int) -> str:
        place = self.due(step)[0]
        return f"{self.places.index(place)}/{place.storage.begin(step)}"

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
        for place in self.places:
            if step in place.storage.steps():
                place.storage.remove(step)

    def set_aside(self, steps: Sequence[int]) -> None:
        for place in self.places:
            here = set(place.storage.steps())
            place.storage.set_aside([step for step in steps if step in here])

    def steps_set_aside(self) -> list[int]:
        return sorted(step for place in self.places for step in place.storage.steps_set_aside())

    def remove_set_aside(self) -> None:
        for place in self.places:
            place.storage.remove_set_aside()

    def _of(self, attempt: str) -> tuple[Storage, str]:
        number, _, inner = attempt.partition("/")
        return self.places[int(number)].storage, inner
