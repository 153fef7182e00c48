"""A small engine without a model, which keeps the whole protocol, and factories for processes that run it.

Only what needs torch imports it: a process with such an engine is there in a tenth of a second.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_rollout import (
    Completion,
    EngineDiedError,
    EngineStats,
    Request,
    RequestError,
    RolloutError,
)
from gcore_rollout.errors import make_extra_error

if TYPE_CHECKING:
    from gcore_rollout import EngineProcess, SharedWeights


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class FakeEngine:
    """Token t of a sample is its t-th random number times 1000, and takes ``step_s`` times its index + 1.

    Some requests do what their ids say. Weights must be those named in ``names``, if that is given. With
    ``first_only``, all samples of a request but the first hang.
    """

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        names: Sequence[str] | None = None,
        version: int = 0,
        first_only: bool = False,
    ) -> None:
        self.weights: dict[str, Any] = {}
        self.served: list[tuple[str, int, int]] = []
        self.calls: list[str] = []
        self.weight_version = version
        self.num_slots = 4
        self.closed = False
        self.died = asyncio.Event()
        self._step_s = step_s
        self._names = names
        self._first_only = first_only
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._running: dict[asyncio.Task[None], str] = {}
        self._aborted: set[asyncio.Task[None]] = set()
        self._goes = asyncio.Event()
        self._goes.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            num_running=len(self._running),
            num_waiting=0,
            weight_version=self.weight_version,
            num_slots=self.num_slots,
        )

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        self._check_alive()
        finished: asyncio.Queue[Completion] = asyncio.Queue()
        tasks: list[asyncio.Task[None]] = []
        for request in requests:
            self._obey(request.request_id)
            self.served.append(
                (request.request_id, len(request.sample_indices), len(request.prefixes))
            )
            self._prompt_tokens += len(request.prompt_token_ids)
            for index in request.sample_indices:
                task = asyncio.create_task(self._sample(request, index, finished))
                self._running[task] = request.request_id
                task.add_done_callback(lambda done: self._running.pop(done))
                tasks.append(task)
        death = asyncio.create_task(self.died.wait())
        try:
            for _ in tasks:
                item = asyncio.create_task(finished.get())
                await asyncio.wait([item, death], return_when=asyncio.FIRST_COMPLETED)
                if not item.done():
                    item.cancel()
                    self._check_alive()
                completion = await item
                if completion.request_id == "finish what cannot be pickled":
                    completion = replace(completion, token_ids=UnpicklableError())
                yield completion
                if completion.request_id == "finish one and fail":
                    raise RequestError("no more")
        finally:
            for task in (*tasks, death):
                task.cancel()

    async def _sample(
        self, request: Request, index: int, finished: "asyncio.Queue[Completion]"
    ) -> None:
        from gcore_rollout.engines.queueing import sample_seeds, uniforms

        if self._first_only and index > 0:
            await self.died.wait()
        seed = sample_seeds(request.seed, np.array([index]))
        tokens: list[int] = []
        versions: list[int] = []
        for cut_short in request.prefixes:
            if cut_short.index == index:
                tokens, versions = cut_short.token_ids.tolist(), cut_short.weight_versions.tolist()
        task = asyncio.current_task()
        assert task is not None
        while len(tokens) < request.sampling.max_tokens and task not in self._aborted:
            await asyncio.sleep(self._step_s * (1 + index))
            await self._goes.wait()
            if task not in self._aborted:
                tokens.append(int(1000 * uniforms(seed, np.array([len(tokens)]))[0]))
                versions.append(self.weight_version)
                self._completion_tokens += 1
        self._aborted.discard(task)
        finished.put_nowait(
            Completion(
                request_id=request.request_id,
                index=index,
                token_ids=np.array(tokens, np.int64),
                log_probs=np.zeros(len(tokens), np.float32),
                weight_versions=np.array(versions, np.int32),
                finish_reason="length" if len(tokens) == request.sampling.max_tokens else "abort",
            )
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        self.calls.append(f"abort {request_ids}")
        self._aborted |= {
            t for t, name in self._running.items() if request_ids is None or name in request_ids
        }

    async def pause(self) -> None:
        self.calls.append("pause")
        self._goes.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self._goes.set()

    async def sleep(self, *, keep_weights: bool = True) -> None:
        self._check_alive()
        if self._running:
            raise RolloutError(f"{len(self._running)} samples are running")
        self.calls.append("sleep" if keep_weights else "sleep without weights")

    async def wake(self, *, weights: bool = True, cache: bool = True) -> None:
        self._check_alive()
        parts = {"weights": weights, "cache": cache}
        self.calls.append(
            "wake" if all(parts.values()) else f"wake {' '.join(p for p in parts if parts[p])}"
        )

    async def update_weights(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        self._check_alive()
        new = dict(weights)
        if self._names is not None and sorted(new) != sorted(self._names):
            raise ValueError(f"weights {sorted(new)} are not the model's {sorted(self._names)}")
        if version <= self.weight_version:
            raise ValueError(
                f"version is {version}; expected a version above the current {self.weight_version}"
            )
        self.weights = {name: tensor.clone() for name, tensor in new.items()}
        self.weight_version = version

    async def close(self) -> None:
        self.closed = True
        self.died.set()

    def die(self) -> None:
        """What the death of a process looks like to its owner."""
        self.died.set()

    def _check_alive(self) -> None:
        if self.closed:
            raise RolloutError("the engine is closed")
        if self.died.is_set():
            raise EngineDiedError("the fake engine died")

    def _obey(self, request_id: str) -> None:
        match request_id:
            case "be killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "hang":
                time.sleep(60)
            case "wait":
                self._step_s = 1000
            case "refuse":
                raise RequestError("too long")
            case "miss an extra":
                raise make_extra_error("vllm", "vllm")
            case "raise what cannot be pickled":
                raise UnpicklableError
            case "check weights":
                if any(not bool((w == self.weight_version).all()) for w in self.weights.values()):
                    raise ValueError("weights of two versions")
            case "poison":
                self.die()
                self._check_alive()
            case _:
                pass


def report() -> FakeEngine:
    """Tells what the process is like, as an error."""
    links = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    raise RolloutError(
        json.dumps(
            {
                "GREETING": os.environ.get("GREETING"),
                "folder": str(Path.cwd()),
                "threads": sys.modules["torch"].get_num_threads()
                if "torch" in sys.modules
                else None,
                "ignores_sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
                "sockets": sum(str(link).startswith("socket:") for link in links),
            }
        )
    )


def sleep_for_ever() -> FakeEngine:
    time.sleep(1000)
    return FakeEngine()


def be_killed() -> FakeEngine:
    os.kill(os.getpid(), signal.SIGKILL)
    return FakeEngine()


def make_when_free(holder: Path) -> FakeEngine:
    """Make an engine unless this file is there, like vLLM while another process has the GPU's memory."""
    if holder.exists():
        raise ValueError(
            "Free memory on device cuda:0 (3.5/79.2 GiB) on startup is less than desired GPU memory utilization"
        )
    return FakeEngine()


class BlockingEngine(FakeEngine):
    """Its updates block the event loop for eight seconds; to version 9, its process is stopped."""

    def __init__(self) -> None:
        super().__init__()
        # Which would otherwise block it when the first weights are unpickled.
        import_module("gcore_rollout.weight_sync.weight_references")

    async def update_weights(self, weights: Iterable[tuple[str, Any]], *, version: int) -> None:
        if version == 9:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(8)
        await super().update_weights(weights, version=version)


def make_logged(log: Path) -> FakeEngine:
    """Make an engine whose process has a log as standard error."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    return FakeEngine()


async def make_slow_engine() -> FakeEngine:
    return FakeEngine(step_s=0.02)


class Owner(FakeEngine):
    """An engine process that has an engine process of its own: ``prompt_tokens`` is that one's number."""

    inner: "EngineProcess"
    shared: "SharedWeights"

    def stats(self) -> EngineStats:
        return EngineStats(
            prompt_tokens=self.inner.pid,
            completion_tokens=0,
            num_running=0,
            num_waiting=0,
            weight_version=0,
        )


async def make_owner() -> Owner:
    import torch

    from gcore_rollout import EngineProcess, SharedWeights

    owner = Owner()
    owner.inner = await EngineProcess.start(FakeEngine, preload=())
    owner.shared = SharedWeights()
    owner.shared.write([("w", torch.ones(1 << 20))])
    return owner
