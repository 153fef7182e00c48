"""The parts of a process that live from its first save to its last: locks, plan, staging memory, background threads.

A save goes to the first tier that is due; the committed step is copied from there to the others in the background.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

from gcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from gcore_ckpt.format.boxes import HeldBox
from gcore_ckpt.format.tree import Node, State
from gcore_ckpt.handles import (
    SaveHandle,
    SaveReport,
    raise_repeated,
    raise_uncollected,
    report_at_exit,
)
from gcore_ckpt.loading.reader import read_metric
from gcore_ckpt.ranks.group import RankGroup, exchange, root_decides
from gcore_ckpt.ranks.shards import Holdings, collect
from gcore_ckpt.saving.planner import SavePlanner
from gcore_ckpt.saving.replicas import digest_plain
from gcore_ckpt.saving.saver import Saver
from gcore_ckpt.saving.staging import StagedFile, Stager, Staging
from gcore_ckpt.storage import Storage
from gcore_ckpt.threads import CheckpointCall, Outcome, Workers
from gcore_ckpt.tiers.copying import copy_step
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.tier import OpenTier, OpenTiers

_logger = logging.getLogger(__name__)

T = TypeVar("T")

_COPY_THREADS = min(8, os.cpu_count() or 1)

# A step, the tiers that it is in and goes to, and its save.
_Copy: TypeAlias = tuple[int, list[OpenTier], Outcome[None]]


@contextmanager
def _collector_paused() -> Generator[None]:
    """Pause Python's garbage collector, which would scan the objects of a growing plan several times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SavePipeline:
    """Copies states in the thread of the calls, writes them, in order, in another, and copies steps in a third.

    `planning` are the ranks that save together, for the thread of the calls; `writing` the same for the thread that
    writes, and `copying` for the one that copies committed steps from tier to tier.
    """

    def __init__(
        self,
        tiers: OpenTiers,
        planning: RankGroup,
        writing: RankGroup,
        copying: RankGroup,
        *,
        max_in_flight: int,
        staging: Staging,
        incremental: bool,
    ) -> None:
        self._tiers = tiers
        self._planning = planning
        self._writing = writing
        self._copying = copying
        self._copiers = Workers(_COPY_THREADS)
        self._hashers = Workers(2)
        self._stager = Stager(staging, max_in_flight, self._copiers)
        limits = filter(None, (tiers.max_file_bytes, self._stager.max_file_bytes))
        self._planner = SavePlanner(planning, min(limits, default=None))
        self._savers: list[Saver] = []
        for open_tier in tiers.open_tiers:
            saver = Saver(open_tier.storage, writing, self._hashers, incremental=incremental)
            self._savers.append(saver)
        self._metrics: dict[int, float | None] = {}
        self._deletions: list[Outcome[None]] = []
        # One thread each, so that steps commit in order.
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gcore-ckpt")
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gcore-ckpt-tiers")
        self._copies: dict[SaveHandle, None] = {}
        self._owed: list[_Copy] = []  # by a run before this one
        self._in_use: set[int] = set()  # steps that are being copied, which stay where they are
        self._last: Outcome[Any] | None = None
        self._opened = False
        self._acquired = False
        self._listed = False
        self._newest = -1

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
        """Copy `state` and start to write it; after its commit, copy the step to the other tiers that are due."""
        self._open(call)
        due = self._tiers.list_due(step)
        collected: list[Holdings] = []

        def advance(size_bytes: int) -> None:
            report.written_bytes += size_bytes
            if progress is not None:
                progress(size_bytes, report.size_bytes)

        def prepare() -> tuple[HeldBox, ...]:
            with call.working():
                check()
                raise_repeated(self._copies)
                if self._planning.rank == 0:
                    self._acquire()
                    self._check_order(step)
                collected.append(collect(state, self._planning.rank))
                return collected[0].boxes

        def digests() -> Mapping[str, str]:
            with call.working():
                return digest_plain(collected[0], self._copiers)

        with self._copying_later(step, due, outcome):
            start_s = time.perf_counter()
            staged: SimpleQueue[StagedFile | Exception | None] = SimpleQueue()
            try:
                with _collector_paused():
                    files = self._planner.plan(step, prepare, digests)
                self._newest = max(self._newest, step)
                report.size_bytes = sum(file.size_bytes for file in files)
                planned_s = time.perf_counter()
                report.plan_s = planned_s - start_s
                tree = collected[0].tree
                files_to_write = _drain(staged)
                write = partial(
                    self._write, report, step, due[0], tree, files_to_write, advance, metric
                )
                self._submit(write, outcome)
            except Exception as error:
                outcome.set_exception(error)
                raise
            try:
                for file in self._stager.stage(files, collected[0], call.working):
                    staged.put(file)
            except Exception as error:
                staged.put(error)
                raise
            staged.put(None)
            report.copy_s = time.perf_counter() - planned_s
            delete = partial(self._delete_old_steps, step, due[0], outcome)
            self._deletions = [deletion for deletion in self._deletions if not deletion.done()]
            self._deletions.append(self._submit(delete))

    @contextmanager
    def _copying_later(
        self, step: int, due: list[OpenTier], saved: Outcome[None]
    ) -> Generator[None]:
        """Copy a step to the other tiers that are due, once the save is committed that the block starts."""
        if due[0] is not self._tiers.open_tiers[0] or len(due) > 1:
            # A tier that is slower than its `every` slows training down, and does not fill the others.
            for copy in list(self._copies):
                copy.join()
        owed = list(self._owed)
        if len(due) > 1:
            owed.append((step, due, saved))
        owed_steps = {owed_step for owed_step, _, _ in owed}
        self._in_use |= owed_steps
        try:
            yield
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
        """Set the steps above a committed one aside, after what is in flight; return them."""
        self._open(call)
        self._wait_for_writes()

        def find_later() -> list[int]:
            with call.working():
                self._acquire()
                steps = self._check_exists(step, "roll back to")
            return [later_step for later_step in steps if later_step > step]

        def set_aside() -> None:
            with writing(f"rolling {self._tiers} back to step {step} failed"):
                for open_tier in self._list_led():
                    with call.working():
                        steps_here = self._steps_here(open_tier)
                        later_steps = [later for later in steps if later in steps_here]
                        open_tier.storage.set_aside(later_steps)

        steps = root_decides(self._planning, find_later)
        exchange(self._planning, set_aside, lambda values: values)
        self._newest = step
        self._owed = [copy for copy in self._owed if copy[0] <= step]
        return steps

    def delete(self, call: CheckpointCall, step: int) -> None:
        """Delete a committed step, after what is in flight."""
        self._open(call)
        self._wait_for_writes()

        def check() -> None:
            with call.working():
                self._acquire()
                self._check_exists(step, "delete")

        def remove() -> None:
            with writing(f"deleting step {step} from {self._tiers} failed"):
                for open_tier in self._list_led():
                    with call.working():
                        if step in self._steps_here(open_tier):
                            open_tier.storage.remove(step)

        root_decides(self._planning, check)
        exchange(self._planning, remove, lambda values: values)
        self._owed = [copy for copy in self._owed if copy[0] != step]

    def went_back(self, step: int) -> None:
        """Record that a step was loaded: steps saved above it no longer belong to this run's past."""
        self._newest = min(self._newest, step)

    def wait(self) -> None:
        """Wait for the copies and the deletions; `CheckpointWriteError` if a copy failed."""
        for deletion in self._deletions:
            deletion.wait()
        self._deletions.clear()
        for copy in list(self._copies):
            copy.join()
        raise_uncollected(self._copies)

    def close(self) -> None:
        """Wait until all is written and let the next writer in."""
        for copy in list(self._copies):
            copy.join()
        self._copier.shutdown()
        self._wait_for_writes()
        self._executor.shutdown()
        self._copiers.close()
        self._hashers.close()
        try:
            if self._acquired:
                self._acquired = False
                self._tiers.release()
        finally:
            if self._tiers.node is not None:
                self._tiers.node.release()
            self._writing.close()
            self._copying.close()
        raise_uncollected(self._copies)

    def _wait_for_writes(self) -> None:
        if self._last is not None:
            self._last.wait()

    def _submit(self, act: Callable[[], T], outcome: Outcome[T] | None = None) -> Outcome[T]:
        outcome = outcome or Outcome[T]()
        try:
            self._executor.submit(outcome.set_by, act)
        except RuntimeError:
            # The interpreter has started to exit, and waits for a thread that is still saving.
            self._wait_for_writes()
            Workers(1).submit(partial(outcome.set_by, act))
        self._last = outcome
        return outcome

    def _write(
        self,
        report: SaveReport,
        step: int,
        open_tier: OpenTier,
        tree: Node,
        staged: Iterator[StagedFile],
        advance: Callable[[int], None],
        metric: float | None,
    ) -> None:
        start_s = time.perf_counter()
        storage = open_tier.storage
        try:
            self._savers[open_tier.number].save(step, tree, staged, advance, metric)
            if isinstance(storage, NodeStorage):
                storage.settle(step, self._writing)
        except Exception as error:
            _logger.error("%s", error)  # now: the caller may wait for the save much later, or never
            if isinstance(storage, NodeStorage):
                storage.discard(step, error)
            raise
        if self._writing.rank == 0:  # the others read it, so that all ranks have the root's
            self._metrics[step] = metric
        report.write_s = time.perf_counter() - start_s

    def _copy(self, step: int, due: list[OpenTier], saved: Outcome[None]) -> None:
        first, *slower_tiers = due
        try:
            if saved.exception() is None:
                for open_tier in slower_tiers:
                    copy_step(step, first.storage, open_tier.storage, self._copying)
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

    def _check_exists(self, step: int, purpose: str) -> list[int]:
        """Return the committed steps, of which this must be one."""
        steps = self._tiers.steps()
        if step not in steps:
            missing = f"{self._tiers} holds no step {step!r} to {purpose}"
            raise CheckpointNotFoundError(f"{missing}; its committed steps are {steps}")
        return steps

    def _delete_old_steps(self, step: int, open_tier: OpenTier, saved: Outcome[None]) -> None:
        if saved.exception() is None:
            self._delete_superfluous(open_tier, step)

    def _delete_superfluous(self, open_tier: OpenTier, committed: int) -> None:
        """Delete the steps that a tier is not to keep; log a warning for what cannot be deleted."""
        if open_tier not in self._list_led():
            return
        storage = open_tier.storage
        try:
            superfluous = open_tier.tier.find_superfluous(
                self._steps_here(open_tier), committed, partial(self._metric, storage)
            )
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: the steps to delete cannot be listed: %s", storage, error)
            return
        for step in superfluous:
            if step in self._in_use:
                continue
            try:
                storage.remove(step)
            except (OSError, CheckpointError) as error:
                _logger.warning(
                    "%s: step %d cannot be deleted, and is kept: %s", storage, step, error
                )

    def _metric(self, storage: Storage, step: int) -> float | None:
        if step not in self._metrics:
            self._metrics[step] = read_metric(storage, step)
        return self._metrics[step]

    def _list_led(self) -> list[OpenTier]:
        """Return the tiers that this rank deletes from: the root, and on the machines one rank of each."""
        led: list[OpenTier] = []
        for open_tier in self._tiers.open_tiers:
            if isinstance(open_tier.storage, NodeStorage):
                if open_tier.storage.leads:
                    led.append(open_tier)
            elif self._planning.rank == 0:
                led.append(open_tier)
        return led

    def _steps_here(self, open_tier: OpenTier) -> list[int]:
        """Return the steps that this rank may delete from a tier that it leads."""
        if isinstance(open_tier.storage, NodeStorage):
            return open_tier.storage.steps_here()
        return open_tier.storage.steps()

    def _open(self, call: CheckpointCall) -> None:
        """Open for writing, once, and record the copies that an earlier run has not made."""
        if self._opened:
            return
        if self._tiers.node is not None:
            self._tiers.node.open_for_saving(self._planning, call.working)
        open_tiers = self._tiers.open_tiers
        if len(open_tiers) > 1:
            saved = Outcome[None]()
            saved.set_result(None)
            for step, number in root_decides(self._planning, self._find_missed):
                self._owed.append((step, [open_tiers[0], open_tiers[number]], saved))
        self._opened = True

    def _find_missed(self) -> list[tuple[int, int]]:
        """Return, by tier, the newest step that is due there, if it is above all that are there."""
        missed: list[tuple[int, int]] = []
        with writing(f"{self._tiers} cannot be opened for saving"):
            first, *slower_tiers = self._tiers.open_tiers
            steps = first.storage.steps()
            for open_tier in slower_tiers:
                newest = max(open_tier.storage.steps(), default=-1)
                for step in reversed(steps):
                    if step > newest and open_tier in self._tiers.list_due(step):
                        missed.append((step, open_tier.number))
                        break
        return missed

    def _acquire(self) -> None:
        if self._acquired:
            return
        with writing(f"{self._tiers} cannot be opened for saving"):
            self._tiers.acquire()
        self._acquired = True

    def _check_order(self, step: int) -> None:
        """Raise if the step exists, or is below a latest step that this run has neither saved nor continued from.

        All tiers are checked at first, later only those that are due.
        """
        remedy = "to continue from an earlier step, first call rollback with it, which sets the later ones aside"
        open_tiers = self._tiers.open_tiers
        if self._listed:
            open_tiers = self._tiers.list_due(step)
        for open_tier in open_tiers:
            storage = open_tier.storage
            steps = storage.steps()
            if step in steps:
                raise CheckpointWriteError(
                    f"{storage} already holds step {step}; a committed step is never overwritten ({remedy})"
                )
            if steps and step < steps[-1] and self._newest < steps[-1]:
                raise CheckpointWriteError(
                    f"step is {step}; expected more than {steps[-1]}, the latest step that {storage} holds, which "
                    f"this run has neither saved nor continued from ({remedy})"
                )
        self._listed = True


@contextmanager
def writing(failure: str) -> Generator[None]:
    """Raise an `OSError` of the block as `CheckpointWriteError`, after these words."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(f"{failure}: {error}") from error


def _drain(queue: "SimpleQueue[StagedFile | Exception | None]") -> Iterator[StagedFile]:
    """Yield the files that are put into a queue until it gets None; raise an exception that is put there."""
    while True:
        item = queue.get()
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item
