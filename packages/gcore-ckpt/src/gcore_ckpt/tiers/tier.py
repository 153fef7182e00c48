"""The tiers of a checkpointer: where each is, how often steps go there and how long they stay; all of them, open.

A save goes to the first tier that is due, a load reads the newest step.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeAlias

from gcore_ckpt.errors import CheckpointNotFoundError
from gcore_ckpt.storage import Storage
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.survey import Report, whole_steps

_logger = logging.getLogger(__name__)

BestMode: TypeAlias = Literal["max", "min"]
Plan: TypeAlias = Mapping[str, Any]
"""Where to load from, as JSON: `tier` (its number), `step`, and `places`, None where every machine has all files."""


@dataclass(frozen=True)
class Tier:
    """A place for steps, and which steps go there.

    Attributes:
        path: A folder or a URL, as for `Checkpointer`. With `replicas`, a folder that each machine has of its own, such
            as one on its disk or in `/dev/shm`; else one place that all ranks see.
        every: The steps to save there are the multiples of this.
        keep: After each commit, delete the lowest steps there until this many are left. None keeps all.
        keep_every: Steps that are multiples of this stay there for good.
        keep_best: As many steps with the best metric of `save` stay there, too.
        best_mode: Whether the highest metric is the best, or the lowest: `"max"` or `"min"`.
        replicas: Number of other machines that get a copy of what a machine's ranks write. 0 survives the death of
            processes, 1 the loss of any one machine with its disk. None: the place is not on the machines.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> disk = Tier("/local/checkpoints", every=5, keep=2, replicas=1)
        >>> remote = Tier("s3://bucket/run", every=50, keep=3, keep_best=1)
        >>> def due(step: int) -> list[str]:
        ...     return [tier.path for tier in (disk, remote) if step % tier.every == 0]
        >>> due(55)
        ['/local/checkpoints']
        >>> due(100)
        ['/local/checkpoints', 's3://bucket/run']
    """

    path: str | os.PathLike[str]
    _: KW_ONLY
    keep: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best_mode: BestMode = "max"
    every: int = 1
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}; expected 1 or more")
        if self.replicas is not None and self.replicas < 0:
            raise ValueError(
                f"replicas is {self.replicas}; expected None (a place that all ranks see) or 0 or more"
            )
        if self.replicas is not None and "://" in str(self.path):
            raise ValueError(
                f"replicas is {self.replicas} and path is {self.path}; expected a folder of each machine"
            )
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep is {self.keep}; expected None (keep all steps) or 1 or more")
        for name, value in (("keep_every", self.keep_every), ("keep_best", self.keep_best)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected None or 1 or more")
            if value is not None and self.keep is None:
                raise ValueError(
                    f"{name} is {value} and keep is None, which keeps all steps; expected a keep"
                )
        if self.best_mode not in ("max", "min"):
            raise ValueError(f"best_mode is {self.best_mode!r}; expected 'max' or 'min'")

    def find_superfluous(
        self, steps: list[int], committed: int | None, metric_of: Callable[[int], float | None]
    ) -> list[int]:
        """Return those of `steps` (ascending) that may go, never the one just committed.

        `metric_of` returns the metric of a step, and is called only if the best are kept.
        """
        if self.keep is None:
            return []
        candidates = [step for step in steps if step != committed]
        num_latest = self.keep
        if committed is not None:
            num_latest -= 1
        best = self._best(steps, metric_of)
        superfluous: list[int] = []
        for step in candidates[: max(0, len(candidates) - num_latest)]:
            is_multiple = self.keep_every is not None and step % self.keep_every == 0
            if not is_multiple and step not in best:
                superfluous.append(step)
        return superfluous

    def _best(self, steps: Sequence[int], metric_of: Callable[[int], float | None]) -> list[int]:
        """Return the steps with the best metrics; of equal ones the later."""
        if self.keep_best is None:
            return []
        ranked: list[tuple[float, int]] = []
        for step in steps:
            metric = metric_of(step)
            if metric is None:
                continue
            if self.best_mode == "min":
                metric = -metric
            ranked.append((metric, step))
        ranked.sort(reverse=True)
        return [step for _, step in ranked[: self.keep_best]]


def finite_metric(step: int, metric: float | None) -> float | None:
    """Return a metric as it is stored; None, after a warning, for one that is not finite."""
    if metric is None:
        return None
    value = float(metric)
    if not math.isfinite(value):
        _logger.warning("metric of step %d is %s: the step is none of the best", step, value)
        return None
    return value


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
        _, copies = whole_steps(reports)[step]
        sources = self.node.find_sources(copies)
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
