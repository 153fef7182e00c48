"""Saves to several places, each with its own frequency and retention, and loads the newest step that is whole."""

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal

from gcore_ckpt.checkpointer import Checkpointer
from gcore_ckpt.errors import CorruptCheckpointError, LostRankError
from gcore_ckpt.format.tree import State
from gcore_ckpt.handles import SaveHandle, SaveReport
from gcore_ckpt.loading.reader import Step
from gcore_ckpt.ranks.group import (
    ProcessGroupArgument,
    RankGroup,
    TorchGroup,
    all_succeed,
    any_rank,
    attempt,
    exchange,
)
from gcore_ckpt.storage import Storage, check_step
from gcore_ckpt.storage.local import open_storage
from gcore_ckpt.threads import CheckpointCall, Outcome
from gcore_ckpt.tiers.node import NodeStorage
from gcore_ckpt.tiers.survey import Report
from gcore_ckpt.tiers.tier import OpenTiers, Plan, Tier

_logger = logging.getLogger(__name__)


class TieredCheckpointer(Checkpointer):
    """Checkpoints in several places: a folder on each machine for frequent saves, a shared or remote one for others.

        tiers = TieredCheckpointer([
            Tier("/local/ckpt", every=1, keep=2, replicas=1),
            Tier("s3://bucket/run", every=50, keep=5),
        ])

    A save copies the state once, into host memory, and writes it to the first tier for which the step is due; after the
    commit, the files are checked and copied from there to the other tiers that are due, in the background. A save for
    which no tier is due does nothing. `load` takes the newest step that is whole anywhere, from the first tier that has
    it; if that copy is damaged, it logs a warning and takes the next tier's.

    On the machines' own disks, each rank's files lie on its machine and on `replicas` others. A save is committed there
    once all copies are made; when the next `save` returns, the machine of any rank may be lost with its disk, at the
    cost of that one step. A group on other machines, or of another size, loads what is left of a step as long as every
    file of it is on some machine.

    All methods are called by all ranks together, `steps` too.

    Args:
        tiers: From the fastest to the slowest. Only the first can be on the machines (`replicas`).
        machine: The name of this rank's machine; ranks of one name share the folder of the first tier. By default, the
            name of the host.
        max_in_flight: As for `Checkpointer`.
        staging: As for `Checkpointer`.
        process_group: As for `Checkpointer`.
        timeout_s: As for `Checkpointer`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> tiers = [Tier("fast", every=1, keep=1), Tier("shared", every=10)]
        >>> with TieredCheckpointer(tiers) as checkpointer:
        ...     for step in (10, 11):
        ...         handle = checkpointer.save(step, {"weight": torch.full((2,), step)})
        ...     checkpointer.wait()
        ...     checkpointer.steps()
        [10, 11]
        >>> Checkpointer("shared").steps()
        [10]
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        machine: str | None = None,
        max_in_flight: int = 1,
        staging: Literal["full", "chunked"] = "full",
        process_group: ProcessGroupArgument = "world",
        timeout_s: float = 600.0,
    ) -> None:
        if not tiers:
            raise ValueError("tiers is empty; expected one or more")
        if any(tier.replicas is not None for tier in tiers[1:]):
            raise ValueError(
                "a tier after the first has replicas; expected them for the first, or for none"
            )
        super().__init__(
            tiers[0].path,
            max_in_flight=max_in_flight,
            staging=staging,
            process_group=process_group,
            timeout_s=timeout_s,
        )
        storages: list[Storage] = []
        for tier in tiers:
            if tier.replicas is None:
                storages.append(open_storage(tier.path))
            else:
                storages.append(NodeStorage(tier.path, tier.replicas))
        self._tiers = OpenTiers(tiers, storages)
        self._machine = machine or socket.gethostname()

    def save(
        self,
        step: int,
        state: State,
        *,
        progress: Callable[[int, int], None] | None = None,
        metric: float | None = None,
        to_all: bool = False,
    ) -> SaveHandle:
        """Start to save `state` to the tiers for which `step` is due; see `Checkpointer.save`.

        The handle waits for the first of them. `wait` and `close` wait for the copies to the others too, and the next
        save to one of the others for the copies before it. An error of a copy is logged, and raised by `wait` and
        `close`; by `save` only after a second one.

        Args:
            step: Number of the step.
            state: As for `Checkpointer.save`.
            progress: As for `Checkpointer.save`.
            metric: As for `Checkpointer.save`.
            to_all: Whether the step goes to every tier, as when the job is to end.
        """
        check_step(step)
        if to_all:
            self._tiers.forced.add(step)
        if self._closed or self._tiers.list_due(step):
            return super().save(step, state, progress=progress, metric=metric)
        nothing = Outcome[None]()
        nothing.set_result(None)
        return SaveHandle(step, nothing, SaveReport())

    def steps(self) -> list[int]:
        """Return the steps that are whole in any tier, ascending. All ranks call this."""

        def steps(call: CheckpointCall) -> list[int]:
            def merge(reports: Sequence[Report]) -> list[list[int]]:
                all_steps = set[int]().union(*self._tiers.reported_steps(reports))
                return [sorted(all_steps)] * len(reports)

            return exchange(self._open_group(call), self._report, merge)

        return self._use("steps", lambda: self._calls.run(steps))

    def delete_local(self) -> None:
        """Delete what is on this machine, after `close`, when all that is to last is in another tier.

        While other ranks of the machine have not closed, nothing is deleted; the last one deletes.
        """
        if self._tiers.node is not None:
            self._tiers.node.delete_local()

    def _read(
        self, call: CheckpointCall, step: Step, fill: Callable[[Storage, int | None], State]
    ) -> State:
        group = self._open_group(call)
        for handle in list(self._handles):
            handle.join()  # what is written now is on some machines and not yet on others
        plan = self._plan(call, step)
        while True:
            state, error = attempt(partial(self._read_planned, call, plan, fill))
            if error is None:
                return state
            if isinstance(error, LostRankError):
                raise error
            # Ranks that could read their parts have another error than the one that could not.
            if not any_rank(group, isinstance(error, CorruptCheckpointError | OSError)):
                raise error
            next_plan, _ = attempt(partial(self._plan, call, plan["step"], above_tier=plan["tier"]))
            if next_plan is None:
                raise error
            damaged = self._tiers.open_tiers[plan["tier"]].storage
            intact = self._tiers.open_tiers[next_plan["tier"]].storage
            _logger.warning(
                "step %d of %s is damaged, and is loaded from %s: %s",
                plan["step"],
                damaged,
                intact,
                error,
            )
            plan = next_plan

    def _plan(self, call: CheckpointCall, step: Step, *, above_tier: int = -1) -> Plan:
        return exchange(
            self._open_group(call),
            self._report,
            lambda reports: self._tiers.plan(reports, step, above_tier=above_tier),
        )

    def _read_planned(
        self, call: CheckpointCall, plan: Plan, fill: Callable[[Storage, int | None], State]
    ) -> State:
        storage = self._tiers.open_tiers[plan["tier"]].storage
        step: int = plan["step"]
        newest: dict[str, list[int]] = {}
        for open_tier, steps in zip(self._tiers.open_tiers, plan["steps"], strict=True):
            newest[str(open_tier.storage)] = steps[-1:]
        _logger.info("step %d is loaded from %s; the newest steps are %s", step, storage, newest)
        # All ranks answer each other's reads until the last of them is done.
        reading: AbstractContextManager[None] = nullcontext()
        if plan["places"] is not None and self._tiers.node is not None:
            peers = self._connect(call)
            assert isinstance(peers, TorchGroup)
            reading = self._tiers.node.reading(step, plan["places"], peers)
        with reading:
            return all_succeed(self._open_group(call), lambda: fill(storage, step))

    def _report(self) -> Report:
        if self._tiers.node is None:
            return {}
        return self._tiers.node.report()

    def _open_group(self, call: CheckpointCall) -> RankGroup:
        if self._group is None:
            group = super()._open_group(call)
            if self._tiers.node is not None:
                self._tiers.node.join(group, self._machine)
        return super()._open_group(call)
