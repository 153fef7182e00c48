"""A function in a process of its own, under limits of time and memory: both its ends, and a reward that runs so."""

import asyncio
import logging
import pickle
import resource
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gcore_rollout.engines.remote import session
from gcore_rollout.engines.remote.fork_server import Channel, ChildProcess, pack_frame, read_frame
from gcore_rollout.errors import RewardError, require
from gcore_rollout.rewards.reward import (
    SLOW_S,
    RewardFunction,
    Scored,
    check_row,
    describe_call,
    finish_call,
    make_exit_error,
    name_of,
    warn_of_slow_call,
)
from gcore_rollout.rewards.runner import is_async, pause_time_limit

_SERVE = "gcore_rollout.rewards.process:serve_function"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Limits of a function in a process of its own.

    Example:
        >>> from gcore_rollout.rewards.kinds.verifiers import MathVerifyReward
        >>> limits = ProcessLimits(call_s=0.5, memory_bytes=256 << 20)
        >>> async def main():
        ...     reward = ProcessReward(MathVerifyReward, limits=limits, limit_score=0.0)
        ...     score = await reward("", "$9^{9^{9^{9}}}$", {"answer": "9"})
        ...     reward.close()
        ...     return score
        >>> asyncio.run(main())
        Scored(score=0.0, parts={}, feedback='', answer=None)
    """

    call_s: float = 10.0
    """Seconds of one call, after which the process is killed and another one started."""
    memory_bytes: int = 2 << 30
    """Memory that calls may take in addition to what the process has when the function is made."""

    def __post_init__(self) -> None:
        require("call_s", self.call_s, self.call_s > 0, "more than 0")
        require("memory_bytes", self.memory_bytes, self.memory_bytes > 0, "more than 0")


_Call = tuple[tuple[Any, ...], "asyncio.Future[Any]"]
"""The arguments of a call without an answer yet, and the answer to come."""
_SETUP = 0
_CALL = 1
"""Numbers of messages: the function is made first, and then called; each answer has the number of its message."""


class ProcessReward:
    """Runs a synchronous reward in a process of its own, which is killed when a call takes too long.

    The reward scores one completion, or takes lists, in a `BatchReward`.

    One process answers all calls, one after the other. It is forked at the first call from a server that has imported
    ``preload``, again after it was killed, and ends with the event loop of its calls. A call that exceeds a limit, or
    ends the process in any other way, scores ``limit_score``; None: it raises `RewardError`. The calls after it are not
    affected.

    ``make`` returns the reward and is picklable, such as ``partial(MathVerifyReward, answer_key="gold")``. It is
    called here, too, unless its result is given as ``reward``: one that cannot be made is an error at once.

    Example:
        >>> from functools import partial
        >>> from gcore_rollout.rewards.kinds.verifiers import MathVerifyReward
        >>> async def main():
        ...     reward = ProcessReward(partial(MathVerifyReward, answer_key="gold"), limit_score=0.0)
        ...     score = await reward("What is 1 + 1?", "2", {"gold": "2"})
        ...     reward.close()
        ...     return score
        >>> asyncio.run(main())
        Scored(score=1.0, parts={}, feedback='', answer='2')
    """

    def __init__(
        self,
        make: Callable[[], RewardFunction],
        *,
        reward: RewardFunction | None = None,
        limits: ProcessLimits | None = None,
        limit_score: float | None = None,
        preload: tuple[str, ...] = (),
    ) -> None:
        if reward is None:
            reward = make()
        if is_async(reward):
            raise RewardError(
                f"reward {name_of(reward)!r} is async; expected a synchronous one in a process of its own"
            )
        self.__name__ = name_of(reward)
        self.check_row = partial(check_row, reward)
        self.limits = limits or ProcessLimits()
        self._limit_score = limit_score
        self._preload = preload
        self._make = make
        self._process: LimitedProcess | None = None

    async def __call__(self, prompt: Any, completion: Any, row: Any) -> Any:
        """Score one completion, or lists of them; see the class."""
        plain: Any = dict(row) if isinstance(row, Mapping) else list(map(dict, row))
        loop = asyncio.get_running_loop()
        if self._process is None or self._process.loop is not loop or self._process.is_closed:
            describe = partial(describe_call, self)
            self._process = LimitedProcess(
                self._make, self.limits, describe=describe, preload=self._preload
            )
        # Calls ahead of this one may each take as long as they are allowed to.
        with pause_time_limit():
            try:
                return await self._process.ask((prompt, completion, plain))
            except LimitExceededError as error:
                if self._limit_score is None:
                    raise RewardError(str(error)) from None
                _logger.warning(
                    "reward %r %s, and scores %g: %.80r",
                    self.__name__,
                    error,
                    self._limit_score,
                    completion,
                )
                return Scored(score=self._limit_score)

    def close(self) -> None:
        """End the process. Idempotent."""
        if self._process is not None:
            self._process.close()
            self._process = None


class LimitExceededError(Exception):
    """A call exceeded a limit of its process, or ended it; the message is a predicate, such as "did not answer"."""


class LimitedProcess:
    """Calls a function in a process of its own, which starts again as often as it is killed.

    It belongs to the event loop in which it is made. ``make`` returns the function there, without limits, and is
    picklable. ``describe`` names a call by its arguments, for a warning of a slow one.

    Example:
        >>> from functools import partial
        >>> async def main():
        ...     process = LimitedProcess(partial(partial, max), ProcessLimits(call_s=1.0), describe=str)
        ...     answer = await process.ask((3, 5))
        ...     process.close()
        ...     return answer
        >>> asyncio.run(main())
        5
    """

    def __init__(
        self,
        make: Callable[[], Callable[..., Any]],
        limits: ProcessLimits,
        *,
        describe: Callable[[tuple[Any, ...]], str],
        preload: tuple[str, ...] = (),
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._factory = pickle.dumps(partial(_make_limited, make, limits.memory_bytes))
        self._limits = limits
        self._preload = preload
        self._describe = describe
        self._calls: deque[_Call] = deque()
        """Calls without an answer, in the order in which the process makes them."""
        self._has_calls = asyncio.Event()
        self._channel: Channel | None = None
        """None: no process is ready."""
        self._process: ChildProcess | None = None
        self._clock: asyncio.TimerHandle | None = None
        """Runs while the process makes the first of the calls."""
        self._is_killed = False
        self._task = asyncio.create_task(self._live())

    @property
    def is_closed(self) -> bool:
        """True after `close`, and after the end of the event loop."""
        return self._task.done()

    def close(self) -> None:
        """End the process. Idempotent."""
        self._task.cancel()

    def ask(self, arguments: tuple[Any, ...]) -> "asyncio.Future[Any]":
        """Return the future answer to a call; it may be cancelled.

        Its exception is the function's, or a `LimitExceededError`.
        """
        answer: asyncio.Future[Any] = self.loop.create_future()
        if self._channel is not None:
            self._channel.send((_CALL, arguments))
        self._calls.append((arguments, answer))
        self._has_calls.set()
        if len(self._calls) == 1:
            self._start_clock()
        return answer

    async def _live(self) -> None:
        """Have a process whenever there are calls."""
        try:
            while True:
                await self._has_calls.wait()
                try:
                    await self._serve_until_end()
                except Exception as error:
                    self._fail_all(error)
        finally:
            self._fail_all(RewardError("its event loop ended"))

    async def _serve_until_end(self) -> None:
        """Run one process, and answer the call at which it ended.

        The exception of a function that could not be made is raised.
        """
        is_ready: asyncio.Future[Any] = self.loop.create_future()
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            process = await ChildProcess.fork(_SERVE, [theirs], preload=self._preload)
            stack.callback(process.close)
            channel = await Channel.open(ours, lambda message: self._take(message, is_ready))
            stack.callback(channel.abort)
            channel.send((_SETUP, session.Setup.here(self._factory)))
            await asyncio.wait([is_ready, channel.gone], return_when=asyncio.FIRST_COMPLETED)
            if not is_ready.done():
                raise RewardError(f"its process {await process.wait_for_end()} before it was ready")
            is_ready.result()
            self._process = process
            self._channel = channel
            self._is_killed = False
            for arguments, _ in self._calls:
                channel.send((_CALL, arguments))
            self._start_clock()
            try:
                await channel.gone
                end = await process.wait_for_end()
            finally:
                self._channel = None
                self._process = None
                self._stop_clock()
        if self._calls:
            reason = f"ended its process, which {end}"
            if self._is_killed:
                reason = f"did not answer within {self._limits.call_s:g} s"
            self._answer_first(LimitExceededError(reason))

    def _take(self, message: Any, is_ready: "asyncio.Future[Any]") -> None:
        """Handle an answer: the number of its message and the value, or a failure."""
        if isinstance(message, session.CallFailed):
            pid = 0 if self._process is None else self._process.pid
            number = message.call_id
            value: Any = session.rebuild_exception(message, pid)
        else:
            number, value = message
        if isinstance(value, MemoryError):
            value = LimitExceededError(
                f"took more than {self._limits.memory_bytes / 2**30:.3g} GiB of memory"
            )
        if number == _SETUP:
            finish_call(is_ready, value)
        else:
            self._answer_first(value)
            self._start_clock()

    def _answer_first(self, value: Any) -> None:
        """Answer the first of the calls, which are made one after the other."""
        _, answer = self._calls.popleft()
        if not self._calls:
            self._has_calls.clear()
        finish_call(answer, value)

    def _fail_all(self, error: Exception) -> None:
        while self._calls:
            self._answer_first(error)

    def _start_clock(self) -> None:
        """Start the time of the first call, if a process makes it."""
        self._stop_clock()
        if self._calls and self._channel is not None:
            limit_s = self._limits.call_s
            if limit_s > SLOW_S:
                self._clock = self.loop.call_later(SLOW_S, self._warn, limit_s - SLOW_S)
            else:
                self._clock = self.loop.call_later(limit_s, self._kill)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _warn(self, rest_s: float) -> None:
        warn_of_slow_call(self._describe(self._calls[0][0]))
        self._clock = self.loop.call_later(rest_s, self._kill)

    def _kill(self) -> None:
        assert self._process is not None
        self._is_killed = True
        self._process.kill()


def _make_limited(make: Callable[[], Callable[..., Any]], memory_bytes: int) -> Callable[..., Any]:
    """Make a function, and limit the address space of this process to what it has then and ``memory_bytes``."""
    function = make()
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = num_pages * resource.getpagesize() + memory_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most_bytes = min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, hard))
    return function


def serve_function(channel: socket.socket) -> None:
    """Make the function of a `Setup`, and answer calls in their order until the owner closes its end of the channel.

    Each answer leaves before the next call is made, so that the owner knows which call does not end.
    """
    function: Any = None
    with channel, channel.makefile("rb") as stream:
        for messages in iter(partial(read_frame, stream), None):
            for call_id, message in messages:
                try:
                    if isinstance(message, session.Setup):
                        message.enter()
                        function = pickle.loads(message.factory)()
                        answer: Any = (call_id, None)
                    else:
                        answer = (call_id, function(*message))
                    packed = pickle.dumps(answer, protocol=5)
                except Exception as error:
                    packed = pickle.dumps(session.make_failure(call_id, error), protocol=5)
                except BaseException as error:
                    packed = pickle.dumps(
                        session.make_failure(call_id, make_exit_error(error)), protocol=5
                    )
                try:
                    channel.sendall(pack_frame([packed]))
                except OSError:
                    return
