"""Ctrl-C, and signal handlers that raise, at any moment of a save or a load; real signals in real processes."""

import dis
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

import pytest
import torch
from waiting import wait_until

from gcore_ckpt import Checkpointer, CheckpointError, CheckpointWriteError, verify
from gcore_ckpt.loading.reader import StepReader
from gcore_ckpt.saving.pipeline import SavePipeline
from gcore_ckpt.saving.staging import Stager
from gcore_ckpt.storage.local import LocalStorage
from gcore_ckpt.threads import CheckpointCalls, Outcome

ROUNDS = int(os.environ.get("GCORE_CKPT_SIGNALS", "6"))
LONG_S = 300.0


class Child(Protocol):
    pid: int

    def log(self) -> list[str]: ...
    def join(self) -> None: ...
    def kill(self) -> None: ...


class ForkServer(Protocol):
    def fork(self, function: str, path: Path, log: Path) -> Child: ...


class RankServer(Protocol):
    def pool(self, size: int) -> Any: ...


def check_steps(path: Path) -> list[int]:
    """The committed steps, every element of which must be the number of the step."""
    steps = Checkpointer(path).steps()
    for step in steps:
        verify(path, step)
        state = Checkpointer(path).load(step=step)
        assert state["step"] == step
        assert [len(tensor) for tensor in state["tensors"]] == state["sizes"]
        assert all((tensor == step).all() for tensor in state["tensors"])
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("function", ["save_until_stopped", "save_until_stopped_and_leave_open"])
def test_a_signal_at_any_moment_ends_the_process(
    fork_server: ForkServer, tmp_path: Path, function: str
) -> None:
    path = tmp_path / "checkpoints"
    rng = random.Random(function)
    for number in range(ROUNDS):
        writer = fork_server.fork(function, path, tmp_path / f"log-{number}")
        deadline = time.monotonic() + LONG_S
        while not writer.log() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.03))
        signals = rng.choices([signal.SIGINT, signal.SIGTERM], k=rng.choice([1, 1, 2, 3]))
        for signal_number in signals:
            os.kill(writer.pid, signal_number)
            time.sleep(rng.choice([0.0, 0.002]))
        writer.join()
        *acknowledged, last = writer.log()
        assert last == "exited"
        steps = check_steps(path)
        assert steps[-1] >= int(acknowledged[-1]), "an acknowledged step is gone"
        # A second one may hit the interpreter's exit, where Python stops to wait for threads.
        assert len(signals) > 1 or list(path.glob(".tmp-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("is_sent_again", [False, True])
def test_a_job_that_is_asked_to_end_saves_its_last_step(
    fork_server: ForkServer, tmp_path: Path, is_sent_again: bool
) -> None:
    path = tmp_path / "checkpoints"
    path.mkdir()
    if is_sent_again:
        (path / "again").touch()
    rng = random.Random(0)
    for number in range(ROUNDS if not is_sent_again else 1):
        job = fork_server.fork("save_when_asked", path / f"{number}", tmp_path / f"log-{number}")
        wait_until(lambda job=job: job.log())
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(job.pid, signal.SIGTERM)
        if is_sent_again:
            wait_until(lambda job=job: "saved" in job.log())
            os.kill(job.pid, signal.SIGTERM)  # which acts as before: it ends the process
        job.join()
        *steps, saved, last = job.log()
        assert (saved, last) == ("saved", "exited")
        assert check_steps(path / f"{number}") == [int(steps[-1])]


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 2])
def test_all_ranks_save_when_one_is_asked_to_end(
    rank_server: RankServer, tmp_path: Path, asked: int
) -> None:
    with rank_server.pool(3) as pool:
        outcomes = pool.run("save_when_one_is_asked", str(tmp_path / "checkpoints"), asked, size=3)
    assert outcomes == [(5, rank == asked, True) for rank in range(3)]
    assert Checkpointer(tmp_path / "checkpoints").steps() == [5]
    verify(tmp_path / "checkpoints", 5)


@contextmanager
def handling(number: signal.Signals, handler: Callable[..., object]) -> Generator[None]:
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)


class Interruption:
    """Sends a signal to the main thread at the first call of a function, which returns once it is handled."""

    def __init__(self, handler: Callable[[], Any], number: signal.Signals = signal.SIGTERM) -> None:
        self._handler = handler
        self._number = number
        self._handled = threading.Event()
        self._sent = False

    def handle(self, *_: object) -> None:
        self._handled.set()
        self._handler()

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._sent:
                self._sent = True
                main = threading.main_thread().ident
                assert main is not None
                signal.pthread_kill(main, self._number)
                assert self._handled.wait(LONG_S)
            return function(*args, **kwargs)

        return wrapped


def stop() -> NoReturn:
    sys.exit(3)


def interrupt() -> NoReturn:
    raise KeyboardInterrupt


MOMENTS: Mapping[str, tuple[Any, str]] = {
    "opening": (LocalStorage, "acquire"),
    "planning": (SavePipeline, "_check_order"),
    "copying": (Stager, "_copy"),
    "writing": (LocalStorage, "write_file"),
    "committing": (LocalStorage, "commit"),
    "deleting": (LocalStorage, "remove"),
}


def state_of(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "sizes": [50_000, 3],
        "tensors": [torch.full((50_000,), step), torch.full((3,), step)],
    }


@pytest.mark.parametrize("staging", ["full", "chunked"])
@pytest.mark.parametrize("raising", [stop, interrupt])
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interrupted_save_leaves_whole_steps_and_a_usable_checkpointer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
    raising: Callable[[], NoReturn],
    staging: Any,
) -> None:
    path = tmp_path / "checkpoints"
    if moment != "opening":
        with Checkpointer(path) as first:
            first.save(1, state_of(1))
    owner, name = MOMENTS[moment]
    interruption = Interruption(raising)
    checkpointer = Checkpointer(path, keep=1, staging=staging)
    with handling(signal.SIGTERM, interruption.handle), monkeypatch.context() as patch:
        patch.setattr(owner, name, interruption.wrap(getattr(owner, name)))
        state = state_of(2)
        with pytest.raises((SystemExit, KeyboardInterrupt)):  # noqa: PT012  # whichever call it hits
            checkpointer.save(2, state)
            state["tensors"][0].fill_(-1)
            checkpointer.wait()
        state["tensors"][0].fill_(-1)
    checkpointer.wait()
    assert check_steps(path) in ([], [1], [2])
    checkpointer.save(3, state_of(3)).wait()
    checkpointer.wait()
    checkpointer.close()
    assert check_steps(path) == [3]
    assert list(path.glob(".tmp-*")) == []
    with Checkpointer(path) as second:
        second.save(4, state_of(4))


@contextmanager
def interrupted_at(number: int) -> Generator[None]:
    """Raise KeyboardInterrupt where CPython handles signals: after the n-th call, jump back or start of a function.

    Only in functions that are called inside the block.
    """
    left = number
    instructions: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes = True
        if event == "opcode":
            done = instructions.get(frame, "")
            instructions[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            left -= done.startswith(("CALL", "JUMP_BACKWARD", "RESUME"))
            if not left:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.fixture
def no_garbage_collection() -> Generator[None]:
    """Collect no cycles, because CPython reports what is raised in a finalizer and continues, as if nothing was raised.

    The frames that `interrupted_at` traces are cycles, and hold what the functions of earlier blocks used.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collection")
@pytest.mark.parametrize("does_wait", [True, False])
def test_a_wait_that_is_interrupted_anywhere_lets_the_other_thread_finish(does_wait: bool) -> None:
    """Wherever a signal is handled, no lock stays taken that the thread needs which sets the outcome."""
    for number in range(1, 1000):
        outcome, called, calls = Outcome[int](), threading.Event(), CheckpointCalls()
        setter = threading.Timer(0.01 if does_wait else 0.0, outcome.set_result, [1])
        setter.start()
        if not does_wait:
            setter.join()
        is_over = False
        try:
            with interrupted_at(number):
                assert outcome.result() == 1
                calls.run(lambda _: called.set())  # noqa: B023  # run at once
                is_over = True
        except KeyboardInterrupt:
            pass
        setter.join(LONG_S)
        assert outcome.done(), number
        assert outcome.wait(LONG_S), number
        calls.run(lambda _: called.set())  # noqa: B023
        assert called.is_set()
        calls.close()
        if is_over:
            break
    else:
        pytest.fail("there are more places than were tried")


def test_an_interrupted_close_can_be_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, released = threading.Event(), threading.Event()
    commit, close = LocalStorage.commit, SavePipeline.close
    interruption = Interruption(interrupt)

    def slow_commit(*args: Any) -> None:
        assert closing.wait(LONG_S)
        interruption.wrap(released.wait)(LONG_S)
        commit(*args)

    def noted_close(pipeline: SavePipeline) -> None:
        closing.set()
        close(pipeline)

    monkeypatch.setattr(LocalStorage, "commit", slow_commit)
    monkeypatch.setattr(SavePipeline, "close", noted_close)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state_of(1))
    with handling(signal.SIGTERM, interruption.handle), pytest.raises(KeyboardInterrupt):
        checkpointer.close()
    released.set()
    checkpointer.close()
    assert check_steps(tmp_path) == [1]
    with Checkpointer(tmp_path) as second:
        second.save(2, state_of(2))


def test_an_interrupted_load_stops_writing_to_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {f"x{i}": torch.ones(2 << 20) for i in range(16)})
        checkpointer.wait()
        template = {f"x{i}": torch.zeros(2 << 20) for i in range(16)}
        interruption = Interruption(interrupt)
        with handling(signal.SIGTERM, interruption.handle), monkeypatch.context() as patch:
            patch.setattr(StepReader, "read", interruption.wrap(StepReader.read))
            with pytest.raises(KeyboardInterrupt):
                checkpointer.load(template)
        for tensor in template.values():
            tensor.fill_(-1)
        checkpointer.load(
            {"x0": torch.zeros(2 << 20)}
        )  # after all that the interrupted load still does
        assert all((tensor == -1).all() for tensor in template.values())
        checkpointer.save(2, state_of(2)).wait()


@pytest.mark.parametrize("method", ["save", "load", "close", "rollback"])
@pytest.mark.parametrize("moment", ["planning", "copying"])
def test_a_call_from_a_signal_handler_during_a_save_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, method: str
) -> None:
    calls: Mapping[str, Callable[[], object]] = {
        "save": lambda: checkpointer.save(9, {}),
        "load": lambda: checkpointer.load(),
        "close": lambda: checkpointer.close(),
        "rollback": lambda: checkpointer.rollback(1),
    }
    caught: list[Exception] = []

    def handle() -> None:
        try:
            calls[method]()
        except CheckpointError as error:
            caught.append(error)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(1)).wait()
        owner, name = MOMENTS[moment]
        interruption = Interruption(handle)
        with handling(signal.SIGTERM, interruption.handle), monkeypatch.context() as patch:
            patch.setattr(owner, name, interruption.wrap(getattr(owner, name)))
            checkpointer.save(2, state_of(2)).wait()
        [error] = caught
        assert f"{method} was called while save is running on the same Checkpointer" in str(error)
        assert check_steps(tmp_path) == [1, 2]
        checkpointer.save(3, state_of(3))
    assert check_steps(tmp_path) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 1])
@pytest.mark.parametrize("moment", ["planning", "copying"])
def test_all_ranks_hear_of_an_interruption_and_can_save_again(
    rank_server: RankServer, tmp_path: Path, moment: str, interrupted: int
) -> None:
    with rank_server.pool(3) as pool:
        heard = pool.run(
            "save_while_one_is_interrupted", str(tmp_path), moment, interrupted, size=3
        )
    assert heard[interrupted] == "KeyboardInterrupt"
    reason = f"rank {interrupted}: the call was interrupted by a signal in its process"
    assert all(reason in message for rank, message in enumerate(heard) if rank != interrupted), (
        heard
    )
    assert Checkpointer(tmp_path).steps() == [1, 3]
    for step in (1, 3):
        verify(tmp_path, step)


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 1])
def test_an_interrupted_load_of_one_rank_is_an_error_on_all(
    rank_server: RankServer, tmp_path: Path, interrupted: int
) -> None:
    with rank_server.pool(3) as pool:
        heard = pool.run("load_while_one_is_interrupted", str(tmp_path), interrupted, size=3)
    assert heard[interrupted] == "KeyboardInterrupt"
    reason = f"rank {interrupted}: the call was interrupted by a signal in its process"
    assert all(reason in message for rank, message in enumerate(heard) if rank != interrupted), (
        heard
    )


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 2])
def test_a_rank_that_is_interrupted_while_it_waits_for_others_can_leave(
    rank_server: RankServer, tmp_path: Path, interrupted: int
) -> None:
    with rank_server.pool(3) as pool:
        heard = pool.run("leave_while_waiting", str(tmp_path), interrupted, size=3)
    assert heard[interrupted] == "left"
    assert all(": " in message for rank, message in enumerate(heard) if rank != interrupted), heard
    assert Checkpointer(tmp_path).steps() == [1]


@pytest.mark.slow
@pytest.mark.parametrize("interrupted", [0, 1])
def test_ranks_hear_of_one_whose_process_ends(
    rank_server: RankServer, tmp_path: Path, interrupted: int
) -> None:
    with rank_server.pool(3) as pool:
        pool.start("exit_while_saving", str(tmp_path), interrupted, ranks=range(3))
        outcomes = pool.collect(range(3), LONG_S)
    assert outcomes[interrupted] == {}
    for rank, outcome in enumerate(outcomes):
        assert rank == interrupted or outcome["error"].startswith(("CheckpointWriteError: ", "LostRankError: ",
                                                                  "CheckpointError: ")), outcome  # fmt: skip
    assert Checkpointer(tmp_path).steps() == [1]


def test_errors_of_the_caller_are_still_raised_by_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError):
            checkpointer.save(1, {"x": object()})
        checkpointer.save(1, {}).wait()
        with pytest.raises(CheckpointWriteError, match="already holds step 1"):
            checkpointer.save(1, {})
        checkpointer.wait()
