"""Steps whose files lie on the machines of the ranks: each has those of its own ranks, and copies of others' files."""

import logging
import os
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from gcore_ckpt.errors import CheckpointLockedError, CheckpointWriteError, LostRankError
from gcore_ckpt.ranks.group import RankGroup, TorchGroup, all_succeed, exchange, root_decides
from gcore_ckpt.storage import StepFiles, open_for_writing, step_name
from gcore_ckpt.storage.local import LocalFiles, LocalStorage
from gcore_ckpt.tiers.machines import Machines
from gcore_ckpt.tiers.survey import Copies, Report, report, whole_steps

if TYPE_CHECKING:
    from gcore_ckpt.tiers.transfer import PeerFiles

_logger = logging.getLogger(__name__)


class NodeStorage:
    """The steps in a folder that each machine has of its own, as one `Storage` for the ranks of a group.

    A folder holds the index of each step and some of its files. A step is one if every file of it is on some machine.
    Files reach the other machines, and a step becomes one, in `settle`, which all ranks call after they have written.

    Args:
        path: The folder of this rank's machine.
        replicas: Number of other machines that get a copy of each file.
    """

    max_file_bytes = 256 << 20  # held whole in memory on its way to another machine

    def __init__(self, path: str | os.PathLike[str], replicas: int) -> None:
        self.local = LocalStorage(path)
        self._replicas = replicas
        self._steps: set[int] = set()  # the whole ones, at the root, while it may write
        self._written: dict[str, int] = {}
        self._committed: int | None = (
            None  # the step of the save that is being settled, once it is one here
        )
        self._prepared = "", ""  # the attempt, and its index, at the root
        self._peers: PeerFiles | None = None
        self._machines = Machines([""])
        self.leads = True
        """Whether this rank is the one that commits and deletes on its machine."""

    def __str__(self) -> str:
        return str(self.local)

    def join(self, group: RankGroup, machine: str) -> None:
        """Exchange the names of machines, to know which ranks share one (all ranks)."""
        self._machines = Machines(
            exchange(group, lambda: machine, lambda names: [names] * len(names))
        )
        self.leads = self._machines.leader(group.rank) == group.rank

    def report(self, steps: Sequence[int] | None = None) -> Report:
        """Return what this machine holds, at its leader."""
        return report(self.local, steps) if self.leads else {}

    def open_for_saving(
        self, group: RankGroup, working: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Lock the folder of each machine, and remove the parts of steps that are not whole (all ranks)."""
        try:
            self._open_for_saving(group, working)
        except BaseException:
            self.release()
            raise

    def _open_for_saving(
        self, group: RankGroup, working: Callable[[], AbstractContextManager[None]]
    ) -> None:
        local_report: dict[str, Mapping[str, Any]] = {}
        kept: dict[str, str] = {}

        def lock() -> Report:
            with working():
                if self.leads:
                    self.local.acquire()
                local_report.update(self.report())
            return local_report

        def find_whole(reports: Sequence[Report]) -> Sequence[dict[str, str]]:
            steps = whole_steps(reports)
            self._steps = set(steps)
            return [{str(step): index for step, (index, _) in steps.items()}] * len(reports)

        def remove_parts() -> None:
            with working():
                for step in self.local.steps() if self.leads else []:
                    part = local_report.get(str(step))
                    if part is None or part["index"] != kept.get(str(step)):
                        self._remove_part(step)

        kept.update(exchange(group, lock, find_whole))
        if group.rank == 0 and len(self._machines.ranks) <= self._replicas:
            _logger.warning(
                "%s: replicas is %d and the ranks are on %d machine(s); expected more machines for as many copies",
                self,
                self._replicas,
                len(self._machines.ranks),
            )
        all_succeed(group, remove_parts)

    def _remove_part(self, step: int) -> None:
        try:
            self.local.remove(step)
        except OSError as error:
            _logger.warning("%s: the part of step %d cannot be deleted: %s", self, step, error)

    def release(self) -> None:
        self.local.release()

    def delete_local(self) -> None:
        """Delete the folder of this machine, unless it is in use."""
        with suppress(CheckpointLockedError), open_for_writing(self.local):
            shutil.rmtree(self.local.path, ignore_errors=True)

    def acquire(self) -> None:
        """Do nothing: `open_for_saving` takes the locks of all machines."""

    def steps(self) -> list[int]:
        """Return the whole steps, as the root knows them while it may write."""
        return sorted(self._steps)

    def steps_here(self) -> list[int]:
        """Return the steps of which this machine has a part; at the root, the whole ones too."""
        return sorted({*self.local.steps(), *self._steps})

    def open_step(self, step: int) -> AbstractContextManager[StepFiles]:
        """Open a step: its files on this machine, or all of them while `reading`."""
        if self._peers is not None:
            return nullcontext(self._peers)
        return self.local.open_step(step)

    def begin(self, step: int) -> str:
        return self.local.begin(step)

    def write_file(self, attempt: str, name: str, parts: Sequence[memoryview]) -> None:
        (self.local.path / attempt).mkdir(exist_ok=True)
        self.local.write_file(attempt, name, parts)
        self._written[name] = sum(part.nbytes for part in parts)

    def link_file(self, attempt: str, step: int, file: str, name: str) -> None:
        """Raise `OSError`: the file may be on another machine."""
        raise OSError(
            f"{attempt}/{name} cannot be a link to {file} of step {step}, which may be on another machine"
        )

    def commit(self, attempt: str, step: int, index: bytes, sizes: Mapping[str, int]) -> None:
        """Keep the index for `settle`, once all ranks have written."""
        del step, sizes
        self._prepared = attempt, index.decode()

    def abort(self, attempt: str) -> None:
        self.local.abort(attempt)

    def settle(self, step: int, group: RankGroup) -> None:
        """Copy what was written to other machines, and commit on all; raise the same error on all (all ranks)."""
        try:
            self._settle(step, group)
        except Exception as error:
            raise CheckpointWriteError(f"saving step {step} to {self} failed: {error}") from error
        if group.rank == 0:
            self._steps.add(step)

    def _settle(self, step: int, group: RankGroup) -> None:
        attempt: str = root_decides(group, lambda: self._prepared[0])
        written = self._written
        self._written = {}
        self._committed = None

        def copy() -> Mapping[str, int]:
            if not isinstance(group, TorchGroup):
                return written
            from gcore_ckpt.tiers.transfer import exchange_copies

            files = LocalFiles(self.local.path / attempt)

            def read(name: str, buffer: memoryview) -> None:
                files.open(name)
                if files.read_into(name, 0, buffer) != len(buffer):
                    raise OSError(
                        f"{files.folder / name} has not the {len(buffer)} bytes that were written"
                    )

            def write(name: str, buffer: memoryview) -> None:
                (self.local.path / attempt).mkdir(exist_ok=True)
                self.local.write_file(attempt, name, [buffer])

            with files if written else nullcontext():
                return written | exchange_copies(
                    group, self._machines, self._replicas, written, read, write
                )

        def share(
            written: Sequence[Mapping[str, int]],
        ) -> Sequence[tuple[str, Mapping[str, int]] | None]:
            """Return the index, and the files that each machine must hold, for its leader to commit."""
            sizes: dict[int, dict[str, int]] = {}
            for rank, files in enumerate(written):
                sizes.setdefault(self._machines.leader(rank), {}).update(files)
            parts: list[tuple[str, Mapping[str, int]] | None] = [None] * group.size
            for rank, rank_sizes in sizes.items():
                parts[rank] = (self._prepared[1], rank_sizes)
            return parts

        part = exchange(group, copy, share)

        def commit() -> None:
            if part is not None:
                (self.local.path / attempt).mkdir(exist_ok=True)
                self.local.commit(attempt, step, part[0].encode(), part[1])
                self._committed = step

        all_succeed(group, commit)

    def discard(self, step: int, error: BaseException) -> None:
        """Remove what a save that has failed left on this machine; the step may be whole if a rank was lost."""
        self._written = {}
        if not self.leads:
            return
        for folder in self.local.path.glob(f".tmp-{step_name(step)}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        if self._committed == step and not isinstance(error.__cause__, LostRankError):
            self.local.remove(step)

    def remove(self, step: int) -> None:
        self._steps.discard(step)
        if step in self.local.steps():
            self.local.remove(step)

    def set_aside(self, steps: Sequence[int]) -> None:
        self._steps -= set(steps)
        self.local.set_aside([step for step in self.local.steps() if step in steps])

    def find_sources(self, copies: Copies) -> Sequence[Mapping[str, tuple[int, int]]]:
        """Return, for each rank, the size of each file and the rank to ask for it; -1 where its machine has it."""
        sources: list[dict[str, tuple[int, int]]] = [{} for _ in self._machines.of]
        for number, (name, (size_bytes, holders)) in enumerate(sorted(copies.items())):
            for rank, rank_sources in enumerate(sources):
                rank_sources[name] = (size_bytes, self._machines.holder(rank, holders, number))
        return sources

    def readers(self, copies: Copies) -> dict[str, tuple[int, list[int]]]:
        """Return the size of each file, and the ranks on machines that have it."""
        machines = self._machines
        readers: dict[str, tuple[int, list[int]]] = {}
        for name, (size_bytes, holders) in copies.items():
            ranks: list[int] = []
            for leader in holders:
                ranks.extend(machines.ranks[machines.of[leader]])
            readers[name] = (size_bytes, ranks)
        return readers

    @contextmanager
    def reading(
        self, step: int, sources: Mapping[str, tuple[int, int]], group: TorchGroup
    ) -> Generator[None]:
        """Let all ranks open a step whose files are spread over machines (all ranks, by a group of its own)."""
        from gcore_ckpt.tiers.transfer import PeerFiles

        is_here = any(rank < 0 for _, rank in sources.values())
        with ExitStack() as stack:

            def open_own() -> PeerFiles:
                local_files = stack.enter_context(self.local.open_step(step)) if is_here else None
                return PeerFiles(group, local_files, sources, f"{self}/{step_name(step)}")

            files = self._peers = all_succeed(group, open_own)
            files.start()
            is_lost = False
            try:
                yield
            except LostRankError:
                is_lost = True
                stack.pop_all()  # the others may still ask this rank, which answers until its process ends
                raise
            finally:
                self._peers = None
                if not is_lost:
                    files.stop()
                    group.close()
