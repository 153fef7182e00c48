"""The tiers of a Checkpointer, open: a save goes to the first that is due, a load reads the newest step."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

from gcore_ckpt.errors import CheckpointNotFoundError
from gcore_ckpt.storage import Storage
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.survey import Report, whole_steps
from gcore_ckpt.tiers.tier import Tier

Plan: TypeAlias = Mapping[str, Any]
"""Where to load from, as JSON: `tier` (its number), `step`, and `places`, None where every machine has all files."""


@dataclass(frozen=True)
class OpenTier:
    """A tier, its place in the order of tiers, and its storage."""

    number: int
    tier: Tier
    storage: Storage


class OpenTiers:
    """The tiers from the fastest to the slowest; only the first can be on the machines (`node`)."""

    def __init__(self, tiers: Sequence[Tier], storages: Sequence[Storage]) -> None:
        self.open_tiers: list[OpenTier] = []
        for number, (tier, storage) in enumerate(zip(tiers, storages, strict=True)):
            self.open_tiers.append(OpenTier(number, tier, storage))
        self.node: NodeStorage | None = None
        if isinstance(storages[0], NodeStorage):
            self.node = storages[0]
        self.forced: set[int] = set()
        """Steps that go to all tiers, whatever their `every`."""

    def __str__(self) -> str:
        return ", ".join(str(open_tier.storage) for open_tier in self.open_tiers)

    @property
    def max_file_bytes(self) -> int | None:
        """Largest data file to write; it is held whole in memory on its way to the next tier."""
        if len(self.open_tiers) > 1:
            return NodeStorage.max_file_bytes
        return self.open_tiers[0].storage.max_file_bytes

    def list_due(self, step: int) -> list[OpenTier]:
        """Return the tiers that a step goes to, the first of which it is saved to and then copied from."""
        if step in self.forced:
            return self.open_tiers
        return [open_tier for open_tier in self.open_tiers if step % open_tier.tier.every == 0]

    def steps(self) -> list[int]:
        """Return the committed steps of all tiers, ascending (root; those on the machines once it may write)."""
        steps: set[int] = set()
        for open_tier in self.open_tiers:
            steps.update(open_tier.storage.steps())
        return sorted(steps)

    def reported_steps(self, reports: Sequence[Report]) -> list[list[int]]:
        """Return the committed steps of each tier, from what `NodeStorage.report` returned on every rank (root)."""
        steps_of_tiers: list[list[int]] = []
        for open_tier in self.open_tiers:
            if open_tier.storage is self.node:
                steps_of_tiers.append(sorted(whole_steps(reports)))
            else:
                steps_of_tiers.append(open_tier.storage.steps())
        return steps_of_tiers

    def plan(
        self, reports: Sequence[Report], step: int | str, *, above_tier: int = -1
    ) -> list[Plan]:
        """Return, for each rank, where to load a step from: the first tier above a number that has it (root)."""
        steps_of_tiers = self.reported_steps(reports)
        all_steps = sorted(set[int]().union(*steps_of_tiers))
        if not all_steps:
            raise CheckpointNotFoundError(f"{self} hold no committed step")
        if step == "latest":
            step = all_steps[-1]
        tier: int | None = None
        for number, steps in enumerate(steps_of_tiers):
            if step in steps and number > above_tier:
                tier = number
                break
        if tier is None or not isinstance(step, int):
            raise CheckpointNotFoundError(
                f"{self} hold no step {step!r}; their committed steps are {all_steps}"
            )
        plan = {"tier": tier, "step": step, "steps": steps_of_tiers, "places": None}
        if self.node is None or tier:
            return [plan] * len(reports)
        sources = self.node.find_sources(whole_steps(reports)[step])
        for rank_sources in sources:
            if any(rank >= 0 for _, rank in rank_sources.values()):
                return [plan | {"places": files} for files in sources]
        return [plan] * len(reports)

    def acquire(self) -> None:
        """Open all tiers for writing, or none."""
        with ExitStack() as undo:
            for open_tier in self.open_tiers:
                open_tier.storage.acquire()
                undo.callback(open_tier.storage.release)
            undo.pop_all()

    def release(self) -> None:
        """Let the next writer in."""
        for open_tier in self.open_tiers:
            open_tier.storage.release()
