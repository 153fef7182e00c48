"""The part forms: new bfloat16 weights in every form of weight sync, in turn with a copy of all of them."""

import asyncio
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds, Run
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.sync import MEMCPY, memcpy_seconds
from gcore_rollout import (
    AdapterWeights,
    Engine,
    FullWeights,
    WeightMirror,
    WeightPublisher,
    WeightReceiver,
    WeightSender,
    WeightSubscriber,
    make_delta,
)
from gcore_rollout.weight_sync.updates import A_OF, B_OF, WeightUpdate, merged

_ROWS, _COLUMNS, _RANK = 1024, 512, 16
_FRACTIONS = {"delta 0.1 %": 0.001, "delta 1 %": 0.01, "delta 10 %": 0.1, "delta 100 %": 1.0}
_STORE_FRACTION = 0.01
_BUCKET_BYTES = 32 << 20
_TIMEOUT_S = 120

State = dict[str, torch.Tensor]


class _Sink:
    """The part of an engine that an update needs: it copies the weights into its own. It has a mirror."""

    def __init__(self, state: State) -> None:
        self.weight_version = 0
        self.own = {name: tensor.clone() for name, tensor in state.items()}
        self.mirror = WeightMirror(cast(Engine, self), state.items())

    @property
    def version(self) -> int:
        assert self.mirror.version is not None
        return self.mirror.version

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        for name, tensor in weights:
            self.own[name].copy_(tensor)
        self.weight_version = version


async def run_rounds(options: RolloutOptions, folder: Path, *, say: Callable[[str], object]) -> list[Run]:
    """Measure the copy and every form in turn.

    Raises:
        BenchError: an engine has other weights than those that were sent.
    """
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    state = {f"layers.{i}.weight": _random(_ROWS, _COLUMNS, generator) for i in range(options.sync_mb)}
    forms = _Forms(state, folder, generator)
    rounds = Rounds("forms", options.rounds, say=say)
    names = (MEMCPY, "full", *_FRACTIONS, "adapters", "store full", "store delta 1 %", "broadcast")
    try:
        for turn in rounds.turns(names):
            row = await forms.measured(turn.contender)
            row["wall_s"] = row["encode_s"] + row["apply_s"]
            turn.done({turn.contender: row}, f"{row['wall_s']:.3f} s")
    finally:
        forms.close()
    return rounds.runs


class _Forms:
    """The sender's weights, and an engine for each way of sending."""

    def __init__(self, state: State, folder: Path, generator: torch.Generator) -> None:
        self._state = state
        self._folder = folder
        self._generator = generator
        self._version = 0
        self._direct = _Sink(state)
        self._far = _Sink(state)
        self._num_stores = 0
        self._publisher: WeightPublisher | None = None
        self._peer: _Peer | None = None

    async def measured(self, name: str) -> Figures:
        """Return bytes sent, seconds to encode them, and seconds from then until the engine has them."""
        self._version += 1
        match name:
            case "memcpy":
                apply_s = memcpy_seconds(self._far.own, self._state)
                return {"sent_bytes": _size_bytes(self._state), "encode_s": 0.0, "apply_s": apply_s}
            case "full":
                update = FullWeights(version=self._version, tensors=self._state.items())
                return await self._applied(lambda: update, self._state)
            case "adapters":
                adapters = self._new_adapters()
                return await self._applied(lambda: adapters, dict(merged(self._state, adapters)))
            case "store full" | "store delta 1 %":
                return await self._store(is_full=name == "store full")
            case "broadcast":
                return self._broadcast()
            case _:
                old, self._state = self._state, self._changed(_FRACTIONS[name])
                versions = {"base_version": self._direct.version, "version": self._version}
                return await self._applied(lambda: make_delta(old, self._state.items(), **versions), self._state)

    def close(self) -> None:
        if self._peer is not None:
            self._peer.close()

    async def _applied(self, encode: Callable[[], WeightUpdate], expected: State) -> Figures:
        start_s = time.perf_counter()
        update = encode()
        made_s = time.perf_counter()
        await self._direct.mirror.apply(update)
        end_s = time.perf_counter()
        _check(self._direct, expected)
        sent_bytes = _size_bytes(expected) if isinstance(update, FullWeights) else update.size_bytes
        return {"sent_bytes": sent_bytes, "encode_s": made_s - start_s, "apply_s": end_s - made_s}

    def _new_adapters(self) -> AdapterWeights:
        tensors: State = {}
        for name in self._state:
            layer = name.removesuffix(".weight")
            tensors[layer + A_OF] = _random(_RANK, _COLUMNS, self._generator)
            tensors[layer + B_OF] = _random(_ROWS, _RANK, self._generator)
        return AdapterWeights(base_version=self._direct.version, version=self._version, scaling=2.0, tensors=tensors)

    async def _store(self, *, is_full: bool) -> Figures:
        """Publish a version and load it; a delta is to the version published before it in the same round."""
        if is_full:
            self._num_stores += 1
        else:
            self._state = self._changed(_STORE_FRACTION)
        folder = self._folder / f"store-{self._num_stores}"
        if is_full or self._publisher is None:
            self._publisher = WeightPublisher(f"file://{folder}")
        start_s = time.perf_counter()
        manifest = self._publisher.publish(self._state.items(), version=self._version)
        made_s = time.perf_counter()
        await self._far.mirror.apply(*await WeightSubscriber(f"file://{folder}").load(have=self._far.mirror.version))
        end_s = time.perf_counter()
        _check(self._far, self._state)
        if not is_full:
            shutil.rmtree(folder)
        return {"sent_bytes": manifest.size_bytes, "encode_s": made_s - start_s, "apply_s": end_s - made_s}

    def _broadcast(self) -> Figures:
        if self._peer is None:
            self._peer = _Peer(self._state, self._folder)
            self._peer.send(self._state, self._version)
            self._version += 1
        start_s = time.perf_counter()
        sent_s, end_s = self._peer.send(self._state, self._version)
        size_bytes = _size_bytes(self._state)
        return {"sent_bytes": size_bytes, "encode_s": sent_s - start_s, "apply_s": max(0.0, end_s - sent_s)}

    def _changed(self, fraction: float) -> State:
        """Return new weights in which this fraction of elements differs."""
        return {
            name: torch.where(torch.rand(tensor.shape, generator=self._generator) < fraction, -tensor, tensor)
            for name, tensor in self._state.items()
        }


class _Peer:
    """Another process with an engine, in one gloo group with this one."""

    def __init__(self, state: State, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        file, shapes = str(folder / "rendezvous"), {name: tuple(tensor.shape) for name, tensor in state.items()}
        self._process = context.Process(target=_follow, args=(other, file, shapes), daemon=True)
        self._process.start()
        _join(file, rank=0)
        self._sender = WeightSender(_world(), bucket_bytes=_BUCKET_BYTES)

    def send(self, state: State, version: int) -> tuple[float, float]:
        """Return when all was sent, and when the other process had it in its engine."""
        self._connection.send(None)
        self._sender.send(state.items(), version=version)
        sent_s = time.perf_counter()
        if not self._connection.poll(_TIMEOUT_S):
            raise BenchError("broadcast: the receiver does not answer")
        end_s, checksum = self._connection.recv()
        if checksum != _checksum(state):
            raise BenchError("broadcast: the engine has other weights than those that were sent")
        return sent_s, end_s

    def close(self) -> None:
        self._connection.close()
        self._process.join(_TIMEOUT_S)
        dist.destroy_process_group()


def _follow(connection: Connection, file: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Receive and apply weights in the other process until the connection closes."""
    torch.set_num_threads(1)
    _join(file, rank=1)
    sink = _Sink({name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in shapes.items()})
    receiver = WeightReceiver(_world(), src=0, reuse_buffer=True)
    with suppress(EOFError):  # the connection was closed
        while True:
            connection.recv()
            incoming = receiver.receive()
            asyncio.run(sink.update_weights(incoming.tensors, version=incoming.version))
            connection.send((time.perf_counter(), _checksum(sink.own)))
    dist.destroy_process_group()


def _join(file: str, *, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=_TIMEOUT_S)
    )


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _random(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()


def _size_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


def _checksum(state: State) -> int:
    return sum(int(tensor.view(torch.int16).sum(dtype=torch.int64)) * i for i, tensor in enumerate(state.values(), 1))


def _check(sink: _Sink, expected: State) -> None:
    if not all(torch.equal(sink.own[name], tensor) for name, tensor in expected.items()):
        raise BenchError("forms: an engine has other weights than those that were sent")
