"""What ranks of the tests of broadcasts do: rank 0 sends, the others receive."""

import asyncio
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from engine_oracles import Found, collect
from rank import Rank
from weight_sync_oracles import REQUESTS, as_samples, difference, make_trainer, train

from gcore_rollout import FullWeights, HFEngine, WeightMirror, WeightReceiver, WeightSender, WeightSyncError

SIZE = 3
State = dict[str, torch.Tensor]


def follow_a_trainer(rank: Rank, path: str, bucket_bytes: int, mirrored: bool) -> Any:
    """On rank 0, by version and engine, how far log-probs are off before and after the update."""
    return asyncio.run(_follow_a_trainer(rank, Path(path), bucket_bytes, mirrored=mirrored))


async def _follow_a_trainer(rank: Rank, path: Path, bucket_bytes: int, *, mirrored: bool) -> Any:
    group = rank.groups[SIZE]
    if rank.number == 0:
        trainer, sender = make_trainer(path), WeightSender(group, bucket_bytes=bucket_bytes)
        found: list[tuple[int, float, float]] = []
        for version in (1, 2):
            train(trainer, seed=version)
            sender.send(trainer.export_weights(), version=version)
            for before, after in _gathered(rank, None):
                [old] = trainer.log_probs([as_samples(before)])
                [new] = trainer.log_probs([as_samples(after)])
                versions = {v for c in after.values() for v in c.weight_versions.tolist()}
                assert len(versions) == 1
                found.append((versions.pop(), difference(before, old), difference(after, new)))
        return found
    engine = HFEngine.from_pretrained(path)
    mirror = WeightMirror(engine)
    receiver = WeightReceiver(group, src=0, reuse_buffer=mirrored)
    for _ in range(2):
        before = await collect(engine, *REQUESTS)
        incoming = receiver.receive()
        if mirrored:
            await mirror.apply(FullWeights(version=incoming.version, tensors=incoming.tensors))
        else:
            await engine.update_weights(incoming.tensors, version=incoming.version)
        _gathered(rank, (before, await collect(engine, *REQUESTS)))
    return None


def _gathered(rank: Rank, value: Any) -> list[tuple[Found, Found]]:
    """What the other ranks gave, on rank 0."""
    values: list[Any] = [None] * SIZE
    dist.gather_object(value, values if rank.number == 0 else None, dst=0, group=rank.groups[SIZE])
    return values[1:]


def pass_on(rank: Rank, states: list[State], bucket_bytes: int) -> list[tuple[int, list[str], State]] | list[int]:
    """What was received of each; on rank 0, how many broadcasts each took."""
    group = rank.groups[SIZE]
    if rank.number == 0:
        sender = WeightSender(group, bucket_bytes=bucket_bytes)
        return [_count_broadcasts(sender, state, version) for version, state in enumerate(states, 1)]
    receiver = WeightReceiver(group, src=0)
    received: list[tuple[int, list[str], State]] = []
    for _ in states:
        incoming = receiver.receive()
        tensors = list(incoming.tensors)
        received.append((incoming.version, [name for name, _ in tensors], dict(tensors)))
    return received


def _count_broadcasts(sender: WeightSender, state: State, version: int) -> int:
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as counted:
        sender.send(state.items(), version=version)
    return counted.call_count


def overlap(rank: Rank, bucket_bytes: int) -> list[bool]:
    """On rank 0, whether a bucket was on its way when each tensor was asked for."""
    group = rank.groups[SIZE]
    if rank.number == 0:
        sender = WeightSender(group, bucket_bytes=bucket_bytes)
        is_sending: list[bool] = []

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for number in range(6):
                buckets = sender._buckets  # pyright: ignore[reportPrivateUsage]
                is_sending.append(any(bucket.sending is not None for bucket in buckets))
                yield f"w{number}", torch.ones(16)

        sender.send(weights(), version=1)
        return is_sending
    assert len(dict(WeightReceiver(group, src=0).receive().tensors)) == 6
    return []


def fail_half_way(rank: Rank, path: str, good: State) -> list[str]:
    """What was raised by updates of which the first and the third fail, and at the end the engine's version."""
    group = rank.groups[SIZE]
    raised: list[str] = []
    if rank.number == 0:
        sender = WeightSender(group, bucket_bytes=20_000)
        for version, num_tensors in ((1, 8), (2, None), (3, 0)):
            try:
                sender.send(_torn(good, num_tensors), version=version)
            except OSError as error:
                raised.append(str(error))
        return raised
    engine = HFEngine.from_pretrained(path)
    old = {name: tensor.clone() for name, tensor in engine_weights(engine)}
    receiver = WeightReceiver(group, src=0)
    for version in (1, 2, 3):
        incoming = receiver.receive()
        assert incoming.version == version
        try:
            asyncio.run(engine.update_weights(incoming.tensors, version=version))
        except WeightSyncError as error:
            raised.append(str(error))
        expected = old if version == 1 else good
        assert all(torch.equal(tensor, expected[name]) for name, tensor in engine_weights(engine))
    return [*raised, str(engine.weight_version)]


def engine_weights(engine: HFEngine) -> Iterator[tuple[str, torch.Tensor]]:
    return engine._model.named_parameters()  # pyright: ignore[reportPrivateUsage]


def _torn(state: State, num_tensors: int | None) -> Iterator[tuple[str, torch.Tensor]]:
    yield from islice(state.items(), num_tensors)
    if num_tensors is not None:
        raise OSError("the trainer is out of memory")


def stop_early(rank: Rank, state: State) -> list[int]:
    """How many tensors were taken of each update: rank 1 takes all, rank 2 none, one, and all."""
    group = rank.groups[SIZE]
    if rank.number == 0:
        sender = WeightSender(group, bucket_bytes=100)
        for version in (1, 2, 3, 4, 5):
            sender.send(state.items(), version=version)
        return []
    receiver = WeightReceiver(group, src=0)
    counts: list[int] = []
    for version, num_wanted in ((1, 0), (2, 1), (3, 1), (4, None), (5, 1)):
        incoming = receiver.receive()
        assert incoming.version == version
        wanted = list(islice(incoming.tensors, None if rank.number == 1 else num_wanted))
        assert all(torch.equal(tensor, state[name]) for name, tensor in wanted)
        counts.append(len(wanted))
        if version in (2, 5):  # the others must not wait for a call that does not come
            incoming.tensors.close()  # pyright: ignore[reportAttributeAccessIssue]
    return counts


def reuse(rank: Rank, state: State) -> list[tuple[bool, int]]:
    """Whether each tensor was right when it came, and where its memory is."""
    group = rank.groups[SIZE]
    if rank.number == 0:
        WeightSender(group, bucket_bytes=256).send(state.items(), version=1)
        return []
    incoming = WeightReceiver(group, src=0, reuse_buffer=rank.number == 1).receive()
    kept = [(torch.equal(tensor, state[name]), tensor) for name, tensor in incoming.tensors]
    return [(is_right, tensor.untyped_storage().data_ptr()) for is_right, tensor in kept]


def be_killed(rank: Rank, folder: str) -> list[str]:
    """What the receivers raise; rank 0 hangs once it has sent something."""
    group = rank.groups[SIZE]
    if rank.number == 0:
        WeightSender(group, bucket_bytes=100).send(_hanging(Path(folder)), version=1)
    receiver = WeightReceiver(group, src=0)
    raised: list[str] = []
    tensors = receiver.receive().tensors
    for action in (lambda: dict(tensors), receiver.receive):
        try:
            action()
        except WeightSyncError as error:
            raised.append(type(error).__name__)
    return raised


def _hanging(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(4):
        yield f"w{number}", torch.zeros(100)
    (folder / "sent").touch()
    time.sleep(600)
