"""One modelled replica of an engine: continuous batching, from one finished response to the next."""

import asyncio
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from gcore_llm.simulate.config import EngineModel
from gcore_rollout import Call, Completion, Request


class RunningSample:
    """A response from its request to its completion. Lengths are in tokens."""

    __slots__ = ("begun", "call", "index", "length", "num_begun", "num_prefill", "replica", "request", "start")

    def __init__(
        self,
        *,
        call: Call,
        request: Request,
        index: int,
        begun: Completion | None,
        length: float,
        num_begun: float,
        num_prefill: float,
        replica: int,
    ) -> None:
        self.call = call
        self.request = request
        self.index = index
        self.begun = begun
        self.length = length
        self.num_begun = num_begun
        self.num_prefill = num_prefill
        """Tokens to compute before the first one is decoded."""
        self.replica = replica
        self.start: float | None = None
        """The replica's count of steps when it began; None: it waits."""


class ModelledReplica:
    """Every decoding step takes ``base_s + per_sample_s * B`` with B responses running and gives each a token.

    Responses that begin are prefilled, while those that run stand still. Between two events the count of steps grows
    evenly, so a token may be in the making when a response begins or ends.

    Args:
        finished: called with responses that are complete, after others have taken their places.
        changed: called with True when the first response starts to run, and with False when none is left.
    """

    def __init__(
        self, model: EngineModel, *, finished: Callable[[list[RunningSample]], None], changed: Callable[[bool], None]
    ) -> None:
        self._model = model
        self._finished = finished
        self._changed = changed
        self._waiting: deque[RunningSample] = deque()
        self._running: list[tuple[float, int, RunningSample]] = []
        self._count = 0
        """Of all that have ever begun; orders those that end at the same step."""
        self._steps = 0.0
        self._since_s = 0.0
        """When steps go on, or went on: after prefilling it lies ahead."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_held = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, samples: list[RunningSample]) -> None:
        """More to do, behind what waits."""
        self._waiting.extend(samples)
        self._advance()
        self._go_on()

    def withdraw(self, which: Callable[[RunningSample], bool]) -> list[tuple[RunningSample, float]]:
        """Take responses out; each with the tokens that it has been given here."""
        taken = [(sample, 0.0) for sample in self._waiting if which(sample)]
        running = [entry for entry in self._running if which(entry[2])]
        if taken:
            self._waiting = deque(sample for sample in self._waiting if not which(sample))
        if running:
            self._advance()
            taken += [(s, self._steps - s.start) for _, _, s in running if s.start is not None]
            self._running = sorted(entry for entry in self._running if not which(entry[2]))
            if not self._running:
                self._changed(False)
            self._go_on()
        return taken

    def hold(self) -> None:
        """Stand still."""
        self._advance()
        self._is_held = True
        self._set_timer()

    def release(self) -> None:
        """Go on."""
        self._is_held = False
        self._since_s = max(self._since_s, asyncio.get_running_loop().time())
        self._go_on()

    def _step_s(self) -> float:
        return self._model.base_s + self._model.per_sample_s * len(self._running)

    def _advance(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s > self._since_s:
            if self._running and not self._is_held:
                self._steps += (now_s - self._since_s) / self._step_s()
            self._since_s = now_s

    def _go_on(self) -> None:
        """Start what fits, and wait for the next to end."""
        if not self._is_held:
            self._admit()
        self._set_timer()

    def _admit(self) -> None:
        if not self._running:
            # Small counts are exact ones.
            self._steps = 0.0
            if self._waiting:
                self._changed(True)
        while self._waiting and len(self._running) < self._model.max_num_seqs:
            sample = self._waiting.popleft()
            self._since_s += sample.num_prefill / self._model.prefill_tokens_per_s
            sample.start = self._steps
            self._count += 1
            heappush(self._running, (self._steps + sample.length - sample.num_begun, self._count, sample))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._is_held:
            first = self._running[0][0]
            at_s = self._since_s + (first - self._steps) * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(at_s, self._reach, first)

    def _reach(self, steps: float) -> None:
        """The count of steps at which the next response is complete."""
        self._timer = None
        self._steps = steps
        self._since_s = asyncio.get_running_loop().time()
        ended: list[RunningSample] = []
        while self._running and self._running[0][0] <= steps:
            ended.append(heappop(self._running)[2])
        if not self._running:
            self._changed(False)
        self._go_on()
        self._finished(ended)
