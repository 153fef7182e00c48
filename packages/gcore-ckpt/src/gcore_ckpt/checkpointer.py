"""Saves and loads the steps of one path. Torch is imported by the first save or load, not with the package."""

import os
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from gcore_ckpt.errors import CheckpointError, CheckpointWriteError
from gcore_ckpt.format.tree import State
from gcore_ckpt.handles import (
    LoadHandle,
    LoadReport,
    SaveHandle,
    SaveReport,
    raise_repeated,
    raise_uncollected,
    report_at_exit,
)
from gcore_ckpt.loading.reader import Step, find_step, open_step
from gcore_ckpt.ranks.group import (
    ProcessGroupArgument,
    RankGroup,
    all_succeed,
    any_rank,
    attempt,
    open_group,
    root_decides,
)
from gcore_ckpt.stateful import load_state_dicts, template_of, with_state_dicts
from gcore_ckpt.stopping import StopSignals
from gcore_ckpt.storage import Storage, check_step
from gcore_ckpt.storage.local import open_storage
from gcore_ckpt.threads import CheckpointCall, CheckpointCalls, Outcome
from gcore_ckpt.tiers.tier import BestMode, OpenTiers, Tier, finite_metric

if TYPE_CHECKING:
    import torch

    from gcore_ckpt.saving.pipeline import SavePipeline

T = TypeVar("T")


class Checkpointer:
    """The checkpoints under one path: one process group at a time saves to it, any number of processes read from it.

    The first `save` creates the folder, takes its lock and removes what a dead writer left half done; reading needs no
    lock and changes nothing. In a group, every rank makes the same calls in the same order. Use it from one thread;
    close it, or use it as a context manager, to let the next writer in. A program that ends without closing it still
    finishes the saves in flight; if one of them fails, it logs the error and its exit code is 120.

    Args:
        path: A folder that all ranks see, or a URL such as `s3://bucket/folder`.
        keep: After each commit, delete the lowest committed steps until this many are left, never the one just
            committed. None keeps all.
        keep_every: Steps that are multiples of this stay for good.
        keep_best: As many steps with the best `metric` of `save` stay, next to those that `keep` and `keep_every` keep.
        best_mode: Whether the highest metric is the best, or the lowest: `"max"` or `"min"`.
        max_in_flight: Saves that may be waiting to be written. When there are that many, `save` waits for the oldest.
        staging: `"full"`: a save returns once all is copied, and holds host memory of the size of what this rank
            writes, which is kept for the next. `"chunked"`: two buffers of 128 MiB in all, and a save returns when
            nearly all is written.
        incremental: Whether data that are the same as in the step before are linked to it and not written again.
        process_group: The ranks that save and load together: `"world"` for those of `torch.distributed`, where it is
            initialised; a group of it; None for this process alone.
        timeout_s: How long ranks wait for one another. The death of a rank's process is noticed at once.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> with Checkpointer("checkpoints", keep=2) as checkpointer:
        ...     for step in (10, 20, 30):
        ...         handle = checkpointer.save(step, {"model": model, "step": step})
        ...     checkpointer.wait()
        ...     checkpointer.steps()
        [20, 30]
        >>> state = Checkpointer("checkpoints").load({"model": model, "step": 0})
        >>> state["step"]
        30
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        best_mode: BestMode = "max",
        max_in_flight: int = 1,
        staging: Literal["full", "chunked"] = "full",
        incremental: bool = False,
        process_group: ProcessGroupArgument = "world",
        timeout_s: float = 600.0,
    ) -> None:
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; expected 1 or more")
        if staging not in ("full", "chunked"):
            raise ValueError(f"staging is {staging!r}; expected 'full' or 'chunked'")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s is {timeout_s}; expected more than 0")
        if isinstance(process_group, str) and process_group != "world":  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError(
                f"process_group is {process_group!r}; expected 'world', None or a process group"
            )
        tier = Tier(
            path, keep=keep, keep_every=keep_every, keep_best=keep_best, best_mode=best_mode
        )
        self._tiers = OpenTiers([tier], [open_storage(path)])
        self._max_in_flight = max_in_flight
        self._options: dict[str, Any] = {
            "max_in_flight": max_in_flight,
            "staging": staging,
            "incremental": incremental,
        }
        self._process_group: ProcessGroupArgument = process_group
        self._timeout_s = timeout_s
        self._group: RankGroup | None = None
        self._pipeline: SavePipeline | None = None
        self._handles: dict[
            SaveHandle, None
        ] = {}  # its operations are atomic, and two threads use it
        self._closed = False
        self._pid: int | None = None
        self._inside: str | None = None
        self._stops: list[StopSignals] = []

    def save(
        self,
        step: int,
        state: State,
        *,
        progress: Callable[[int, int], None] | None = None,
        metric: float | None = None,
    ) -> SaveHandle:
        """Start to save `state`; on return it is copied out of live memory, and the caller may change it.

        Args:
            step: Number of the step, 0 or more, not committed or in flight yet.
            state: Nested dict (with str or int keys), list, tuple, named tuple and dataclass of `torch.Tensor` (dense,
                of any device, or a subclass made of such), `DTensor`, `Shard`, Megatron's `ShardedTensor`,
                `numpy.ndarray` (of a native bool, integer, float or complex type), objects with `state_dict` and
                `load_state_dict`, and small values: None, bool, int, float, str, bytes, Enum, numpy scalars, and sets
                of these. In a group, a plain tensor or array is the same on all ranks that have it, and so are small
                values; `PerRank` wraps what is not.
            progress: Is called in another thread with the bytes that this rank has written since the last call, file
                by file, and with those that it writes in all.
            metric: How good the step is, for `keep_best`; in a group, that of the root. Without one, or with one that
                is not finite, a step is none of the best.

        Raises:
            TypeError, ValueError: `step` or a leaf of `state` cannot be saved; the message has its path.
            CheckpointWriteError: The step exists; or the two saves before it failed and no call has waited for their
                handles, in which case this step was not saved and `save` may be called again; or another rank refused.
            CheckpointLockedError: Another writer has the path open for saving.
            CheckpointError: The checkpointer is closed, was used before a fork, or is saving or loading already (a
                signal handler called this).
        """
        return self._use(
            "save", lambda: self._save(step, with_state_dicts(state), progress, metric)
        )

    def _save(
        self,
        step: int,
        state: State,
        progress: Callable[[int, int], None] | None,
        metric: float | None,
    ) -> SaveHandle:
        start_s = time.perf_counter()
        for handle in list(self._handles):
            if handle.abandoned:
                handle.join()
        while True:
            in_flight = [handle for handle in list(self._handles) if not handle.done()]
            if len(in_flight) < self._max_in_flight:
                break
            in_flight[0].join()
        outcome = Outcome[None]()
        handle = SaveHandle(step, outcome, SaveReport(wait_s=time.perf_counter() - start_s))

        def check() -> None:
            check_step(step)
            raise_repeated(self._handles)
            pending_steps = [
                pending.step
                for pending in list(self._handles)
                if pending is not handle and not pending.done()
            ]
            if step in pending_steps:
                raise CheckpointWriteError(f"step {step} is being saved to {self._tiers} already")

        def save(call: CheckpointCall) -> None:
            pipeline = self._open_pipeline(call)
            self._handles[handle] = None
            report_at_exit(handle)
            pipeline.save(
                call,
                step,
                state,
                outcome,
                handle.report,
                progress,
                check,
                finite_metric(step, metric),
            )

        try:
            self._calls.run(save)
        except BaseException:
            handle.abandoned = True
            raise
        return handle

    def load(
        self,
        template: State = None,
        *,
        step: Step = "latest",
        only: Sequence[str] | None = None,
        device: "str | torch.device" = "cpu",
        mmap: bool = False,
        strict: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> State:
        """Return the state of a committed step, not of a save in flight. In a group, all ranks load or none does.

        Args:
            template: What to fill: a tree like the saved one, or of a part of its dicts. Its tensors, of any sharding,
                dtype and device, are filled in place; tensors on the meta device are created on `device`; small
                values, None and empty dicts are replaced by what was saved; an object's `load_state_dict` gets all
                that was saved for it, after its own tensors are filled. Named tuples, dataclasses and members of an
                Enum come back as such. None loads everything, every tensor whole.
            step: Number of the step; `"latest"` is the highest committed one.
            only: Without a template: dotted paths to load, or patterns, whose `*` matches dots: `["model.*.bias"]`.
            device: Where new tensors are made.
            mmap: Without a template: tensors that lie whole in a file are views of it, read when they are touched and
                not checked against their checksums. Writing to one changes memory, never the file.
            strict: Whether it is an error if the template has what was not saved, or if all ranks have an empty dict
                for sharded tensors; otherwise that stays as it is, and is in the report of `load_async`.
            progress: Is called, from several threads, with the bytes that were read since the last call, and with
                those that this rank reads in all.

        Raises:
            CheckpointNotFoundError: The step is not committed, or was deleted meanwhile.
            CheckpointMismatchError: It does not hold what is asked for; nothing was filled.
            CorruptCheckpointError: It is not what was saved, with the file and the tensor. A template that was being
                filled then holds rubbish.
            CheckpointError: Another rank failed; or this is saving or loading already (a signal handler called this).
        """
        options = {
            "only": only,
            "device": device,
            "mmap": mmap,
            "strict": strict,
            "progress": progress,
        }
        load = self._loading(template, step, LoadReport(), options)
        return load_state_dicts(template, self._use("load", lambda: self._calls.run(load)))

    def load_async(
        self,
        template: State = None,
        *,
        step: Step = "latest",
        only: Sequence[str] | None = None,
        device: "str | torch.device" = "cpu",
        mmap: bool = False,
        strict: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> LoadHandle[State]:
        """Start to load a step, as `load` does, while the caller does something else, such as to build a model.

        `wait` of the result returns the state, or raises the errors of `load`; until then the template's tensors must
        not be used. Its `report` says what was missing in the step, what was unused, and how long it took. Further
        calls of this Checkpointer wait for it.
        """
        options = {
            "only": only,
            "device": device,
            "mmap": mmap,
            "strict": strict,
            "progress": progress,
        }
        report = LoadReport()
        load = self._loading(template, step, report, options)
        loaded = self._use("load", lambda: self._calls.start(load))
        return LoadHandle[State](loaded, report, partial(load_state_dicts, template))

    def _loading(
        self, template: State, step: Step, report: LoadReport, options: dict[str, Any]
    ) -> Callable[[CheckpointCall], State]:
        if template is not None and (options["only"] is not None or options["mmap"]):
            raise ValueError(
                "only and mmap are for loading without a template; expected one or the other"
            )
        if template is None and not options["strict"]:
            raise ValueError(
                "strict is False and there is no template; expected a template, or only="
            )
        if isinstance(template, bool | int | float | str):
            raise TypeError(
                f"template is {template!r}; expected a tree of tensors (a step is given as step=...)"
            )

        own_template = template_of(template)

        def load(call: CheckpointCall) -> State:
            from gcore_ckpt.loading.loader import load_step
            from gcore_ckpt.loading.matching import find_held_elsewhere

            start_s = time.perf_counter()
            group = self._open_group(call)
            held_elsewhere = find_held_elsewhere(group, template)

            def fill(storage: Storage, step_number: int | None) -> State:
                report.step = step_number
                with call.working(), open_step(storage, step_number) as reader:
                    report.open_s = time.perf_counter() - start_s
                    return load_step(
                        reader,
                        group,
                        own_template,
                        **options,
                        held_elsewhere=held_elsewhere,
                        report=report,
                        check=call.check,
                    )

            state = self._read(call, step, fill)
            if report.step is not None and step != "latest" and self._pipeline is not None:
                self._pipeline.went_back(report.step)
            return state

        return load

    def rollback(self, step: int) -> list[int]:
        """Make a committed step the latest: set all steps above it aside, after the saves in flight, and return them.

        What is set aside is no longer a step: it is not loaded, does not count for `keep`, and its numbers may be
        saved again. It stays on disk until `gcore-ckpt prune --set-aside`. The change is atomic. In a group, all ranks
        call this.

        Args:
            step: The step to continue from; it is not loaded.

        Raises:
            CheckpointNotFoundError: The step is not committed; nothing has changed.
            CheckpointWriteError: Steps could not be set aside, or an earlier save failed.
            CheckpointLockedError: Another writer has the path open for saving.
            CheckpointError: As in `save`.
        """
        check_step(step)

        def roll_back() -> list[int]:
            self.wait()
            return self._calls.run(lambda call: self._open_pipeline(call).roll_back(call, step))

        return self._use("rollback", roll_back)

    def delete(self, step: int) -> None:
        """Delete a committed step, after the saves in flight. In a group, all ranks call this.

        Args:
            step: Number of the step; it stops being one before its first byte goes.

        Raises:
            CheckpointNotFoundError: The step is not committed.
            CheckpointWriteError: It could not be deleted, or an earlier save failed.
            CheckpointLockedError: Another writer has the path open for saving.
            CheckpointError: As in `save`.
        """
        check_step(step)

        def delete() -> None:
            self.wait()
            self._calls.run(lambda call: self._open_pipeline(call).delete(call, step))

        self._use("delete", delete)

    def stop_on(self, *signals: int) -> StopSignals:
        """Take note of signals instead of ending at once, and return what says whether one has come."""

        def agree(has_come: bool) -> bool:
            return self._use(
                "stop_on",
                lambda: self._calls.run(lambda call: any_rank(self._open_group(call), has_come)),
            )

        stop = StopSignals(signals, agree)
        self._stops.append(stop)
        return stop

    def steps(self) -> list[int]:
        """Return the committed steps, ascending."""
        return self._tiers.steps()

    def wait(self) -> None:
        """Wait until all saves have ended, and the steps that are not to be kept are deleted.

        A step that cannot be deleted is a warning in the log; it is tried again after the next save.

        Raises:
            CheckpointWriteError: A save failed, and no call has waited for its handle. Raised once.
        """
        for handle in list(self._handles):
            if not handle.abandoned:
                handle.join()
        raise_uncollected(self._handles)
        if self._pipeline is not None:
            self._pipeline.wait()

    def close(self) -> None:
        """Wait until all calls have ended and let the next writer in. Loading still works; closing again does nothing.

        If this is interrupted, the saves in flight are still finished; closing again waits for them again.

        Raises:
            CheckpointWriteError: A save failed, and no call has waited for its handle; it is closed all the same.
            CheckpointError: A save or a load is in progress (a signal handler called this).
        """
        if self._pid in (None, os.getpid()):
            self._use("close", self._close)
        raise_uncollected(self._handles)

    def _close(self) -> None:
        self._closed = True
        for stop in reversed(self._stops):
            stop.close()
        is_idle = self._calls.close()
        _, failure = attempt(self._pipeline.close) if self._pipeline is not None else (None, None)
        if self._group is not None and is_idle:
            self._group.close()
        self._pipeline = self._group = None
        if failure is not None:
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, exc: BaseException | None, __: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if exc is None:
                raise
            exc.add_note(f"and a checkpoint was lost: {error}")

    @cached_property
    def _calls(self) -> CheckpointCalls:
        return CheckpointCalls()

    def _use(self, method: str, act: Callable[[], T]) -> T:
        """Run a call, of which there is one at a time."""
        if self._pid not in (None, os.getpid()):
            raise CheckpointError(
                "this Checkpointer was used before a fork: make a new one in the child process"
            )
        if self._closed and method not in ("load", "close"):
            raise CheckpointError(f"the Checkpointer of {self._tiers} is closed")
        if self._inside is not None:
            raise CheckpointError(
                f"{method} was called while {self._inside} is running on the same Checkpointer; expected one call at a "
                f"time: a signal handler should set a flag for the training loop to read, or raise"
            )
        self._inside = method
        try:
            return act()
        finally:
            self._inside = None

    def _read(
        self, call: CheckpointCall, step: Step, fill: Callable[[Storage, int | None], State]
    ) -> State:
        """Find a step on all ranks and return what `fill` returns; if it fails on one rank, raise on all."""
        group = self._open_group(call)
        storage = self._tiers.open_tiers[0].storage
        step_number = root_decides(group, lambda: find_step(storage, step))
        return all_succeed(group, lambda: fill(storage, step_number))

    def _open_group(self, call: CheckpointCall) -> RankGroup:
        if self._group is None:
            self._pid = os.getpid()
            self._group = self._connect(call)
        return self._group

    def _connect(self, call: CheckpointCall) -> RankGroup:
        group = open_group(self._process_group, self._timeout_s)
        if call.dropped:
            group.close()
            raise CheckpointError(f"the Checkpointer of {self._tiers} is closed")
        return group

    def _open_pipeline(self, call: CheckpointCall) -> "SavePipeline":
        group = self._open_group(call)
        if self._pipeline is None:
            from gcore_ckpt.saving.pipeline import SavePipeline

            # Two threads must not share the messages of a group.
            writing = self._connect(call)
            copying = RankGroup()
            if len(self._tiers.open_tiers) > 1:
                copying = self._connect(call)
            self._pipeline = SavePipeline(self._tiers, group, writing, copying, **self._options)
        return self._pipeline
