"""The part forms: new bfloat16 weights in every form of weight sync, in turn with a copy of all of them."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file, save_file

from gcore_bench.harness.options import BenchError
from gcore_bench.harness.report import Figures, Rounds
from gcore_bench.rollout.options import RolloutOptions
from gcore_bench.rollout.sync import MEMCPY, memcpy_seconds
from gcore_rollout import (
    AdapterWeights,
    Engine,
    FullWeights,
    SharedWeights,
    WeightMirror,
    divide_weights,
    make_delta,
    write_part,
)
from gcore_rollout.weight_sync.layout import Layout
from gcore_rollout.weight_sync.updates import A_OF, B_OF, WeightUpdate, merged

_ROWS, _COLUMNS, _RANK = 1024, 512, 16
_FRACTIONS = {"delta 0.1 %": 0.001, "delta 1 %": 0.01, "delta 10 %": 0.1, "delta 100 %": 1.0}
_RANKS = {"1 rank": 1, "2 ranks": 2}
_TIMEOUT_S = 120

State = dict[str, torch.Tensor]
_held: State = {}
"""The weights of this process, if it is a rank."""


class _Sink:
    """The part of an engine that an update needs: it copies the weights into its own. It has a mirror."""

    def __init__(self, state: State) -> None:
        self.weight_version = 0
        self.own = {name: tensor.clone() for name, tensor in state.items()}
        self.mirror = WeightMirror(cast(Engine, self), state.items())

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        for name, tensor in weights:
            self.own[name].copy_(tensor)
        self.weight_version = version

    def check(self, expected: State) -> None:
        if not all(torch.equal(self.own[name], tensor) for name, tensor in expected.items()):
            raise BenchError("forms: an engine has other weights than those that were sent")


async def measure(options: RolloutOptions, folder: Path, rounds: Rounds) -> None:
    """Measure the copy and every form in turn; the engine must then have the weights that were sent."""
    torch.set_num_threads(options.threads)
    forms = _Forms(options, folder)
    names = (MEMCPY, *_RANKS, "full", *_FRACTIONS, "adapters")
    try:
        for turn in rounds.turns(names):
            row = await forms.measured(turn.contender)
            row["wall_s"] = row["encode_s"] + row["apply_s"]
            turn.done({turn.contender: row}, f"{row['wall_s']:.3f} s")
    finally:
        forms.close()


class _Forms:
    """The sender's weights, an engine for each way of sending, and the processes that write parts."""

    def __init__(self, options: RolloutOptions, folder: Path) -> None:
        self._folder = folder
        self._generator = torch.Generator().manual_seed(options.seed)
        self._state = {f"layers.{i}.weight": self._random(_ROWS, _COLUMNS) for i in range(options.sync_mb)}
        self._version = 0
        self._direct = _Sink(self._state)
        self._far = _Sink(self._state)
        context = multiprocessing.get_context("spawn")
        self._ranks = [ProcessPoolExecutor(1, mp_context=context) for _ in range(max(_RANKS.values()))]
        self._shared = SharedWeights()

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
            case "1 rank" | "2 ranks":
                return await self._written(_RANKS[name])
            case _:
                old, self._state = self._state, self._changed(_FRACTIONS[name])
                versions = {"base_version": self._direct.weight_version, "version": self._version}
                return await self._applied(lambda: make_delta(old, self._state.items(), **versions), self._state)

    def close(self) -> None:
        self._shared.close()
        for process in self._ranks:
            process.shutdown()

    async def _applied(self, encode: Callable[[], WeightUpdate], expected: State) -> Figures:
        start_s = time.perf_counter()
        update = encode()
        encoded_s = time.perf_counter()
        await self._direct.mirror.apply(update)
        end_s = time.perf_counter()
        self._direct.check(expected)
        sent_bytes = _size_bytes(expected) if isinstance(update, FullWeights) else update.size_bytes
        return {"sent_bytes": sent_bytes, "encode_s": encoded_s - start_s, "apply_s": end_s - encoded_s}

    async def _written(self, num_ranks: int) -> Figures:
        """Have ranks write their parts to memory, which an engine copies."""
        file, ranks = self._folder / "state.safetensors", self._ranks[:num_ranks]
        save_file(self._state, file)
        for loading in [rank.submit(_load_state, file) for rank in ranks]:
            loading.result(_TIMEOUT_S)
        weights = _RankWeights(ranks)
        start_s = time.perf_counter()
        self._shared.write(weights)
        written_s = time.perf_counter()
        await self._far.update_weights(self._shared, version=self._version)
        end_s = time.perf_counter()
        self._far.check(self._state)
        times = {"encode_s": written_s - start_s, "apply_s": end_s - written_s}
        return {"sent_bytes": weights.rank_bytes, **times}

    def _new_adapters(self) -> AdapterWeights:
        tensors: State = {}
        for name in self._state:
            layer = name.removesuffix(".weight")
            tensors[layer + A_OF] = self._random(_RANK, _COLUMNS)
            tensors[layer + B_OF] = self._random(_ROWS, _RANK)
        base_version = self._direct.weight_version
        return AdapterWeights(base_version=base_version, version=self._version, scaling=2.0, tensors=tensors)

    def _changed(self, fraction: float) -> State:
        """Return new weights in which this fraction of elements differs."""
        return {
            name: torch.where(torch.rand(tensor.shape, generator=self._generator) < fraction, -tensor, tensor)
            for name, tensor in self._state.items()
        }

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self._generator).mul_(0.02).bfloat16()


class _RankWeights:
    """Weights that processes write, each its part."""

    def __init__(self, ranks: Sequence[ProcessPoolExecutor]) -> None:
        self._ranks = ranks
        self.rank_bytes = 0.0
        """Bytes by the rank that has written most."""

    def write_to(self, path: Path) -> tuple[Layout, int]:
        writing = [
            process.submit(_write_part, path, rank, len(self._ranks)) for rank, process in enumerate(self._ranks)
        ]
        written = [part.result(_TIMEOUT_S) for part in writing]
        self.rank_bytes = max(size for _, size in written)
        return written[0][0]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise BenchError("forms: the ranks write the weights")


def _load_state(file: Path) -> None:
    """Keep the weights in this process, which is a rank."""
    torch.set_num_threads(1)
    _held.clear()
    _held.update({name: tensor.clone() for name, tensor in load_file(file).items()})


def _write_part(path: Path, rank: int, num_ranks: int) -> tuple[tuple[Layout, int], float]:
    """Write this rank's part; return the layout of all, and the bytes of the part."""
    own = dict(divide_weights(_held.items(), rank=rank, num_ranks=num_ranks))
    return write_part(own.items(), path), float(sum(tensor.nbytes for tensor in own.values() if not tensor.is_meta))


def _size_bytes(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())
