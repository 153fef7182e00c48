"""Saves to the first tier that is due, and copies the committed step to the others in the background."""

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

from gcore_ckpt.errors import CheckpointError, CheckpointWriteError
from gcore_ckpt.format.tree import Node, State
from gcore_ckpt.handles import (
    SaveHandle,
    SaveReport,
    raise_repeated,
    raise_uncollected,
    report_at_exit,
)
from gcore_ckpt.ranks.group import RankGroup, all_succeed, root_decides
from gcore_ckpt.saving.pipeline import SavePipeline, delete_superfluous, writing
from gcore_ckpt.saving.saver import Saver
from gcore_ckpt.saving.staging import StagedFile
from gcore_ckpt.storage import Storage
from gcore_ckpt.threads import CheckpointCall, Outcome
from gcore_ckpt.tiers.copying import copy_step
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.storage import OpenTier, TieredStorage
from gcore_ckpt.tiers.transfer import Buffer

_logger = logging.getLogger(__name__)

_Copy: TypeAlias = tuple[
    int, list[OpenTier], Outcome[None]
]  # a step, where it is and goes to, and its save


class _TieredSaver(Saver):
    """A `Saver` to the first tier that is due; on the machines, a step is committed once it is copied."""

    _storage: TieredStorage

    def save(
        self,
        step: int,
        tree: Node,
        staged: Iterable[StagedFile],
        advance: Callable[[int], None] = lambda _: None,
        metric: float | None = None,
    ) -> None:
        node = (
            self._storage.node
            if self._storage.due(step)[0] is self._storage.open_tiers[0]
            else None
        )
        try:
            super().save(step, tree, staged, advance, metric)
            if node is not None:
                node.settle(step, self._group)
        except Exception as error:
            if node is not None:
                node.discard(step, error)
            raise


class TieredPipeline(SavePipeline):
    """A `SavePipeline` to several tiers; `copying` are the ranks for the thread that copies from tier to tier."""

    def __init__(
        self,
        storage: TieredStorage,
        planning: RankGroup,
        writing: RankGroup,
        copying: RankGroup,
        **options: Any,
    ) -> None:
        super().__init__(storage, planning, writing, **options)
        self._saver = _TieredSaver(storage, writing, self._hashers, incremental=False)
        self._tiers = storage
        self._copying = copying
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gcore-ckpt-tiers")
        self._buffer = Buffer()
        self._copies: dict[SaveHandle, None] = {}
        self._owed: list[_Copy] = []  # by a run before this one
        self._opened = False
        self._listed = False
        self._in_use: set[int] = set()  # steps that are being copied, which stay where they are

    def save(
        self,
        call: CheckpointCall,
        step: int,
        state: State,
        outcome: Outcome[None],
        report: SaveReport,
        progress: Callable[[int, int], None] | None,
        check: Callable[[], None],
        metric: float | None,
    ) -> None:
        self._open(call)
        due = self._tiers.due(step)
        if due[0] is not self._tiers.open_tiers[0] or len(due) > 1:
            for copy in list(
                self._copies
            ):  # a tier slower than its `every` slows training, not fills the others
                copy.join()
        owed = list(self._owed)
        if len(due) > 1:
            owed.append((step, due, outcome))
        owed_steps = {copy[0] for copy in owed}
        self._in_use |= owed_steps

        def check_copies() -> None:
            check()
            raise_repeated(self._copies)

        try:
            super().save(call, step, state, outcome, report, progress, check_copies, metric)
        except BaseException:
            self._in_use -= owed_steps
            raise
        self._owed = []
        for copy in owed:
            copied = Outcome[None]()
            handle = SaveHandle(copy[0], copied, SaveReport())
            self._copies[handle] = None
            report_at_exit(handle)
            self._copier.submit(copied.set_by, partial(self._copy, *copy))

    def roll_back(self, call: CheckpointCall, step: int) -> list[int]:
        self._open(call)

        def later_steps() -> list[int]:
            with call.working():
                self._acquire()
                steps = self._check_exists(step, "roll back to")
            return [later_step for later_step in steps if later_step > step]

        def set_aside() -> None:
            with writing(f"rolling {self._tiers} back to step {step} failed"), call.working():
                for open_tier in self._tiers.open_tiers:
                    if self._leads(open_tier):
                        here = (
                            later
                            if open_tier.storage is self._tiers.node
                            else open_tier.storage.steps()
                        )
                        open_tier.storage.set_aside(
                            [later_step for later_step in later if later_step in here]
                        )

        later = root_decides(self._planning, later_steps)
        all_succeed(self._planning, set_aside)
        self._newest = step
        self._owed = [copy for copy in self._owed if copy[0] <= step]
        return later

    def delete(self, call: CheckpointCall, step: int) -> None:
        self._open(call)

        def check() -> None:
            with call.working():
                self._acquire()
                self._check_exists(step, "delete")

        def remove() -> None:
            with writing(f"deleting step {step} from {self._tiers} failed"), call.working():
                for open_tier in self._tiers.open_tiers:
                    if self._leads(open_tier) and step in self._steps_here(
                        open_tier, open_tier.storage.steps()
                    ):
                        open_tier.storage.remove(step)

        root_decides(self._planning, check)
        all_succeed(self._planning, remove)
        self._owed = [copy for copy in self._owed if copy[0] != step]

    def wait(self) -> None:
        """Wait for the copies and deletions; `CheckpointWriteError` if a copy failed."""
        super().wait()
        for copy in list(self._copies):
            copy.join()
        raise_uncollected(self._copies)

    def close(self) -> None:
        for copy in list(self._copies):
            copy.join()
        self._copier.shutdown()
        try:
            super().close()
        finally:
            if self._tiers.node is not None:
                self._tiers.node.release()
            self._copying.close()
        raise_uncollected(self._copies)

    def _copy(self, step: int, due: list[OpenTier], saved: Outcome[None]) -> None:
        first, *slower_tiers = due
        try:
            if saved.exception() is None:
                for open_tier in slower_tiers:
                    copy_step(step, first.storage, open_tier.storage, self._copying, self._buffer)
                    self._delete_superfluous(open_tier, step)
        except (OSError, CheckpointError) as error:
            failure = (
                f"step {step} is committed to {first.storage}, "
                f"but copying it to the tiers after it failed: {error}"
            )
            _logger.error("%s", failure)
            raise CheckpointWriteError(failure) from error
        finally:
            self._in_use.discard(step)

    def _delete_old_steps(self, step: int, saved: Outcome[None]) -> None:
        if saved.exception() is None:
            self._delete_superfluous(self._tiers.due(step)[0], step)

    def _delete_superfluous(self, open_tier: OpenTier, step: int) -> None:
        if not self._leads(open_tier):
            return

        def superfluous(steps: list[int]) -> list[int]:
            here = self._steps_here(open_tier, steps)
            old_steps = self._find_superfluous(
                open_tier.storage, open_tier.tier.retention, here, step
            )
            return [old for old in old_steps if old not in self._in_use]

        delete_superfluous(open_tier.storage, superfluous)

    def _open(self, call: CheckpointCall) -> None:
        """Open for writing, once, and record the copies that an earlier run has not made."""
        if self._opened:
            return
        if self._tiers.node is not None:
            self._tiers.node.open_for_saving(self._planning, call.working)
        open_tiers = self._tiers.open_tiers

        def find_missed() -> list[tuple[int, int]]:
            """Return, by tier, the newest step that is due there, if it is above all that are there."""
            missed: list[tuple[int, int]] = []
            with writing(f"{self._tiers} cannot be opened for saving"):
                steps = open_tiers[0].storage.steps()
                for number, open_tier in enumerate(open_tiers[1:], start=1):
                    newest = max(open_tier.storage.steps(), default=-1)
                    due_steps = [
                        step
                        for step in steps
                        if step > newest and open_tier in self._tiers.due(step)
                    ]
                    if due_steps:
                        missed.append((due_steps[-1], number))
            return missed

        saved = Outcome[None]()
        saved.set_result(None)
        self._owed = [
            (step, [open_tiers[0], open_tiers[number]], saved)
            for step, number in root_decides(self._planning, find_missed)
        ]
        self._opened = True

    def _check_order(self, step: int, storage: Storage) -> None:
        """Check the step number against all tiers at first, later only against the tiers that are due."""
        del storage
        for open_tier in self._tiers.due(step) if self._listed else self._tiers.open_tiers:
            super()._check_order(step, open_tier.storage)
        self._listed = True

    def _steps_here(self, open_tier: OpenTier, steps: list[int]) -> list[int]:
        """Return the steps that this rank may delete from a tier, of which these are all: on the machines, its own."""
        return (
            open_tier.storage.steps_here() if isinstance(open_tier.storage, NodeStorage) else steps
        )

    def _leads(self, open_tier: OpenTier) -> bool:
        """Return whether this rank is the one that deletes from a tier, or, on the machines, from its own."""
        return (
            open_tier.storage.leads
            if isinstance(open_tier.storage, NodeStorage)
            else self._planning.rank == 0
        )
