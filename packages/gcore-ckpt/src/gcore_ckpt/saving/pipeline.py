"""The parts of a process that live from its first save to its last: lock, plan, staging memory, background thread.

By the plan of a save every element of every tensor is written once, replicas evenly by the ranks that hold them.
"""

import gc
import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from gcore_ckpt.errors import CheckpointError, CheckpointNotFoundError, CheckpointWriteError
from gcore_ckpt.format.boxes import Box, FileLayout, HeldBox, lay_out, overlap
from gcore_ckpt.format.tree import Node, State
from gcore_ckpt.handles import SaveReport
from gcore_ckpt.loading.reader import read_metric
from gcore_ckpt.ranks.group import Message, RankGroup, exchange, root_decides
from gcore_ckpt.ranks.plain import collect_plain
from gcore_ckpt.ranks.shards import Holdings, collect
from gcore_ckpt.retention import Retention
from gcore_ckpt.saving.replicas import check_same, digest_plain
from gcore_ckpt.saving.saver import Saver
from gcore_ckpt.saving.staging import StagedFile, Stager, Staging
from gcore_ckpt.storage import Storage
from gcore_ckpt.threads import CheckpointCall, Outcome, Workers

_logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_COPY_THREADS = min(8, os.cpu_count() or 1)


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
    """Copies states in the thread of the calls and writes them, in order, in another.

    `planning` are the ranks that save together, for the thread of the calls; `writing` the same for the other.
    `retention` says which of the committed steps may go once a step is committed.
    """

    def __init__(
        self,
        storage: Storage,
        planning: RankGroup,
        writing: RankGroup,
        *,
        retention: Retention,
        max_in_flight: int,
        staging: Staging,
        incremental: bool,
    ) -> None:
        self._storage = storage
        self._planning = planning
        self._writing = writing
        self._copiers = Workers(_COPY_THREADS)
        self._hashers = Workers(2)
        self._stager = Stager(staging, max_in_flight, self._copiers)
        limits = filter(None, (storage.max_file_bytes, self._stager.max_file_bytes))
        self._planner = SavePlanner(planning, min(limits, default=None))
        self._saver = Saver(storage, writing, self._hashers, incremental=incremental)
        self._retention = retention
        self._metrics: dict[int, float | None] = {}
        self._deletions: list[Outcome[None]] = []
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="gcore-ckpt"
        )  # so steps commit in order
        self._last: Outcome[Any] | None = None
        self._acquired = False
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
        """Copy `state` and start to write it."""
        start_s = time.perf_counter()
        collected: list[Holdings] = []

        def advance(size_bytes: int) -> None:
            report.written_bytes += size_bytes
            if progress is not None:
                progress(size_bytes, report.size_bytes)

        def prepare() -> tuple[HeldBox, ...]:
            with call.working():
                check()
                if self._planning.rank == 0:
                    self._acquire()
                    self._check_order(step, self._storage)
                rank = self._planning.rank
                collected.append(
                    collect_plain(state, rank, self._planner.boxes) or collect(state, rank)
                )
                return collected[0].boxes

        def digests() -> Mapping[str, str]:
            with call.working():
                return digest_plain(collected[0], self._copiers)

        staged: SimpleQueue[StagedFile | Exception | None] = SimpleQueue()
        try:
            with _collector_paused():
                files = self._planner.plan(step, prepare, digests)
            self._newest = max(self._newest, step)
            report.size_bytes = sum(file.size_bytes for file in files)
            planned_s = time.perf_counter()
            report.plan_s = planned_s - start_s
            self._submit(
                self._write,
                outcome,
                report,
                step,
                collected[0].tree,
                _drain(staged),
                advance,
                metric,
            )
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
        self._deletions = [deletion for deletion in self._deletions if not deletion.done()]
        self._deletions.append(self._submit(self._delete_old_steps, step, outcome))

    def roll_back(self, call: CheckpointCall, step: int) -> list[int]:
        """Set the steps above a committed one aside, after what is in flight; return them."""

        def set_aside() -> list[int]:
            with call.working():
                self._acquire()
                return self._submit(self._set_aside_above, step).result()

        later = root_decides(self._planning, set_aside)
        self._newest = step
        return later

    def delete(self, call: CheckpointCall, step: int) -> None:
        """Delete a committed step, after what is in flight."""

        def delete() -> None:
            with call.working():
                self._acquire()
                self._submit(self._delete, step).result()

        root_decides(self._planning, delete)

    def went_back(self, step: int) -> None:
        """Record that a step was loaded: steps saved above it no longer belong to this run's past."""
        self._newest = min(self._newest, step)

    def wait(self) -> None:
        """Wait until the steps that retention does not keep are deleted."""
        for deletion in self._deletions:
            deletion.wait()
        self._deletions.clear()

    def close(self) -> None:
        """Wait until all is written and let the next writer in."""
        if self._last is not None:
            self._last.wait()
        self._executor.shutdown()
        self._copiers.close()
        self._hashers.close()
        if self._acquired:
            self._storage.release()
            self._acquired = False
        self._writing.close()

    def _submit(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Outcome[T]:
        outcome = Outcome[T]()
        act = partial(outcome.set_by, partial(function, *args, **kwargs))
        try:
            self._executor.submit(act)
        except (
            RuntimeError
        ):  # the interpreter has started to exit, and waits for a thread that is still saving
            if self._last is not None:
                self._last.wait()
            Workers(1).submit(act)
        self._last = outcome
        return outcome

    def _write(
        self,
        outcome: Outcome[None],
        report: SaveReport,
        step: int,
        tree: Node,
        staged: Iterator[StagedFile],
        advance: Callable[[int], None],
        metric: float | None,
    ) -> None:
        def write() -> None:
            start_s = time.perf_counter()
            try:
                self._saver.save(step, tree, staged, advance, metric)
            except Exception as error:
                _logger.error(
                    "%s", error
                )  # now: the caller may wait for the save much later, or never
                raise
            if self._writing.rank == 0:  # the others read it, so that all ranks have the root's
                self._metrics[step] = metric
            report.write_s = time.perf_counter() - start_s

        outcome.set_by(write)

    def _delete(self, step: int) -> None:
        self._check_exists(step, "delete")
        with writing(f"deleting step {step} from {self._storage} failed"):
            self._storage.remove(step)

    def _check_exists(self, step: int, purpose: str) -> list[int]:
        """Return the committed steps, of which this must be one."""
        steps = self._storage.steps()
        if step not in steps:
            missing = f"{self._storage} holds no step {step!r} to {purpose}"
            raise CheckpointNotFoundError(f"{missing}; its committed steps are {steps}")
        return steps

    def _set_aside_above(self, step: int) -> list[int]:
        steps = self._check_exists(step, "roll back to")
        later = [committed for committed in steps if committed > step]
        with writing(f"rolling {self._storage} back to step {step} failed"):
            self._storage.set_aside(later)
        return later

    def _delete_old_steps(self, step: int, saved: Outcome[None]) -> None:
        if saved.exception() is None and self._planning.rank == 0:
            delete_superfluous(
                self._storage,
                lambda steps: self._find_superfluous(self._storage, self._retention, steps, step),
            )

    def _find_superfluous(
        self, storage: Storage, retention: Retention, steps: list[int], committed: int
    ) -> list[int]:
        return retention.superfluous(steps, committed, lambda step: self._metric(storage, step))

    def _metric(self, storage: Storage, step: int) -> float | None:
        if step not in self._metrics:
            self._metrics[step] = read_metric(storage, step)
        return self._metrics[step]

    def _acquire(self) -> None:
        if self._acquired:
            return
        with writing(f"{self._storage} cannot be opened for saving"):
            self._storage.acquire()
        self._acquired = True

    def _check_order(self, step: int, storage: Storage) -> None:
        """Raise if the step exists, or is below a latest step that this run has neither saved nor continued from."""
        steps = storage.steps()
        remedy = "to continue from an earlier step, first call rollback with it, which sets the later ones aside"
        if step in steps:
            raise CheckpointWriteError(
                f"{storage} already holds step {step}; a committed step is never overwritten ({remedy})"
            )
        if steps and step < steps[-1] and self._newest < steps[-1]:
            raise CheckpointWriteError(
                f"step is {step}; expected more than {steps[-1]}, the latest step that {storage} holds, which "
                f"this run has neither saved nor continued from ({remedy})"
            )


@contextmanager
def writing(failure: str) -> Generator[None]:
    """Raise an `OSError` of the block as `CheckpointWriteError`, after these words."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(f"{failure}: {error}") from error


def delete_superfluous(storage: Storage, superfluous: Callable[[list[int]], list[int]]) -> None:
    """Delete the committed steps that `superfluous` returns; log a warning for what cannot be deleted."""
    try:
        steps = superfluous(storage.steps())
    except (OSError, CheckpointError) as error:
        _logger.warning("%s: the steps to delete cannot be listed: %s", storage, error)
        return
    for step in steps:
        try:
            storage.remove(step)
        except (OSError, CheckpointError) as error:
            _logger.warning("%s: step %d cannot be deleted, and is kept: %s", storage, step, error)


def _drain(queue: "SimpleQueue[StagedFile | Exception | None]") -> Iterator[StagedFile]:
    """Yield the files that are put into a queue until it gets None; raise an exception that is put there."""
    while True:
        item = queue.get()
        if item is None:
            return
        if isinstance(item, Exception):
            raise item
        yield item


class SavePlanner:
    """Plans which files each rank writes. The root makes the plan, and reuses it until a rank's boxes change."""

    def __init__(self, group: RankGroup, max_file_bytes: int | None) -> None:
        self._group = group
        self._max_file_bytes = max_file_bytes
        self.boxes: tuple[HeldBox, ...] = ()  # of this rank, at the last save
        self._files: list[FileLayout] = []
        self._boxes_by_rank: dict[int, Sequence[HeldBox]] = {}  # of all ranks, at the root

    def plan(
        self,
        step: int,
        prepare: Callable[[], tuple[HeldBox, ...]],
        digests: Callable[[], Mapping[str, str]] = dict[str, str],
    ) -> list[FileLayout]:
        """Return the files that this rank writes, once all ranks are ready to save `step`.

        Where the plan is a new one, as at the first save, the ranks compare what `digests` returns of plain tensors.
        """
        boxes = self.boxes

        def prepare_message() -> Message:
            nonlocal boxes
            boxes = prepare()
            return {"step": step, "boxes": None if boxes == self.boxes else boxes}

        numbers = exchange(self._group, prepare_message, self._assign)
        if numbers is not None:
            if self._group.size > 1:
                self._compare(digests)
            self.boxes = boxes
            self._files = lay_out(
                {number: boxes[number] for number in numbers}, self._max_file_bytes
            )
        return self._files

    def _compare(self, digests: Callable[[], Mapping[str, str]]) -> None:
        def check(messages: Sequence[Mapping[str, str]]) -> Sequence[None]:
            check_same(messages)
            return [None] * len(messages)

        try:
            exchange(self._group, digests, check)
        except Exception:
            self.boxes = ()  # so that the next save is planned, and compared, from scratch
            self._boxes_by_rank = {}
            raise

    def _assign(self, messages: Sequence[Message]) -> Sequence[list[int] | None]:
        """Return the numbers of the boxes that each rank writes; None if all write what they wrote before."""
        steps = [message["step"] for message in messages]
        if len(set(steps)) > 1:
            raise ValueError(f"the ranks save different steps: {steps}")
        if all(message["boxes"] is None for message in messages):
            return [None] * len(messages)
        boxes_by_rank = dict(self._boxes_by_rank)
        for rank, message in enumerate(messages):
            boxes = message["boxes"]
            if boxes is None:
                continue
            if rank > 0:  # sent as JSON
                boxes = [HeldBox.from_json(*fields) for fields in boxes]
            boxes_by_rank[rank] = boxes
        writes = assign([boxes_by_rank.get(rank, ()) for rank in range(len(messages))])
        self._boxes_by_rank = boxes_by_rank
        return writes


def assign(boxes_by_rank: Sequence[Sequence[HeldBox]]) -> list[list[int]]:
    """Return the numbers of the boxes that each rank writes: one writer for each box, the bytes spread evenly."""
    if len(boxes_by_rank) == 1:
        boxes = boxes_by_rank[0]
        if len({box.name for box in boxes}) == len(boxes) and all(box.is_whole for box in boxes):
            return [[*range(len(boxes))]]
    first: dict[
        HeldBox, tuple[int, int]
    ] = {}  # the first rank that holds each distinct box, its number in its list
    shared: dict[HeldBox, dict[int, int]] = {}  # all of them, of boxes that several ranks hold
    for rank, boxes in enumerate(boxes_by_rank):
        for number, box in enumerate(boxes):
            owner = first.setdefault(box, (rank, number))
            if owner[0] != rank:
                shared.setdefault(box, dict([owner])).setdefault(rank, number)
    _check_coverage(first)
    writes: list[list[int]] = [[] for _ in boxes_by_rank]
    load_bytes = [0] * len(boxes_by_rank)
    for box, (rank, number) in first.items():
        if not shared:
            writes[rank].append(number)
        elif box not in shared:
            writes[rank].append(number)
            load_bytes[rank] += box.size_bytes
    for box, numbers in sorted(shared.items(), key=lambda item: -item[0].size_bytes):
        rank = min(numbers, key=lambda rank: (load_bytes[rank], rank))
        writes[rank].append(numbers[rank])
        load_bytes[rank] += box.size_bytes
    return [sorted(numbers) for numbers in writes]


def _check_coverage(holders: Mapping[HeldBox, tuple[int, int]]) -> None:
    """Check that the boxes of each tensor, with the first rank that holds each, hold each of its elements once."""
    tensors: dict[str, HeldBox] = {}
    several: dict[str, list[HeldBox]] = {}  # of tensors that are not one whole box
    for box in holders:
        first_box = tensors.setdefault(box.name, box)
        if first_box is not box:
            several.setdefault(box.name, [first_box]).append(box)
        elif not box.is_whole:
            several[box.name] = [box]
    for name, boxes in several.items():
        first = boxes[0]
        for box in boxes[1:]:
            if (box.dtype, box.shape) != (first.dtype, first.shape):
                ranks = holders[first][0], holders[box][0]
                raise ValueError(
                    f"tensor {name!r} has dtype {first.dtype} and shape {first.shape} on rank {ranks[0]}, "
                    f"dtype {box.dtype} and shape {box.shape} on rank {ranks[1]}; parts of one tensor are a DTensor or "
                    "a Shard, and what each rank has of its own is wrapped in PerRank"
                )
        shared = overlap([box.box for box in boxes])
        if shared is not None:
            raise ValueError(
                f"tensor {name!r}: the boxes {shared[0]} and {shared[1]} overlap without being the same"
            )
        num_elements = Box.of_shape(first.shape).size
        num_held = sum(box.box.size for box in boxes)
        if num_held != num_elements:
            raise ValueError(
                f"tensor {name!r} of shape {first.shape} is held in part: its boxes have {num_held} of its "
                f"{num_elements} elements"
            )
