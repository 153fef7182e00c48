"""Weights from one process to two others over gloo, each with an engine of its own."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_oracles import TinyModel
from rank_pool import RankPool, RankServer, serving_ranks
from weight_sync_oracles import TOLERANCE

pytestmark = pytest.mark.slow

State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def rank_server() -> Iterator[RankServer]:
    with serving_ranks(Path(__file__).with_name("weight_sync_broadcast_cases.py")) as server:
        yield server


@pytest.fixture
def ranks(rank_server: RankServer) -> RankPool:
    return rank_server.shared(3)


def state(*, seed: int, count: int = 7) -> State:
    """Tensors of several types and shapes, among them empty ones, a number, and one larger than most buckets here."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (3, 5), (0, 4), (60, 7), (1,), (2, 2, 2), (33,)]
    dtypes = [torch.float32, torch.bfloat16, torch.int64, torch.bool]
    return {f"w{i}": torch.randn(shapes[i % 7], generator=generator).mul(3).to(dtypes[i % 4]) for i in range(count)}


@pytest.mark.parametrize(("bucket_bytes", "mirrored"), [(1, False), (100_000, True), (1 << 28, False)])
def test_two_engines_follow_a_trainer(ranks: RankPool, tied: TinyModel, bucket_bytes: int, mirrored: bool) -> None:
    found, *_ = ranks.run("follow_a_trainer", str(tied.path), bucket_bytes, mirrored, size=3)
    assert [version for version, _, _ in found] == [1, 1, 2, 2]
    for _, before, after in found:
        assert before > 100 * TOLERANCE
        assert after < TOLERANCE


@pytest.mark.parametrize("bucket_bytes", [1, 200, 1 << 20])
def test_every_tensor_comes_as_it_was_sent(ranks: RankPool, bucket_bytes: int) -> None:
    states = [state(seed=0), state(seed=1), {}, state(seed=2, count=9), {"w": torch.ones(2)}]
    _, *received = ranks.run("pass_on", states, bucket_bytes, size=3)
    for of_rank in received:
        for (version, names, tensors), (number, sent) in zip(of_rank, enumerate(states, 1), strict=True):
            assert (version, names) == (number, list(sent))
            for name, tensor in sent.items():
                assert tensors[name].dtype == tensor.dtype
                assert torch.equal(tensors[name], tensor)


def test_a_layout_is_sent_once(ranks: RankPool) -> None:
    """A bucket is a header, its layout if it is new, and a buffer; a header ends it all."""
    same, other = state(seed=1), state(seed=2)
    other["w6"] = other["w6"][:5]
    counts, *_ = ranks.run("pass_on", [state(seed=0), same, other, other], 1 << 20, size=3)
    assert counts == [4, 3, 4, 3]
    # Of seven buckets, one for each tensor, the last is another one then; the empty tensor has no buffer.
    counts, *_ = ranks.run("pass_on", [state(seed=0), same, other, other], 1, size=3)
    assert counts == [21, 14, 15, 14]


@pytest.mark.parametrize(("bucket_bytes", "first"), [(64, 1), (128, 2), (1000, 6)])
def test_tensors_are_asked_for_while_others_are_sent(ranks: RankPool, bucket_bytes: int, first: int) -> None:
    """From the first full bucket on; all tensors have 64 bytes."""
    is_sending, *_ = ranks.run("overlap", bucket_bytes, size=3)
    assert is_sending == [False] * first + [True] * (6 - first)


def test_a_sender_that_fails_leaves_the_receivers_their_old_weights(ranks: RankPool, tied: TinyModel) -> None:
    good = {name: tensor.data for name, tensor in tied.new.named_parameters()}
    sender, *receivers = ranks.run("fail_half_way", str(tied.path), good, size=3)
    assert sender == ["the trainer is out of memory"] * 2
    for raised in receivers:
        assert raised == [
            "the sender of version 1 failed: OSError: the trainer is out of memory",
            "the sender of version 3 failed: OSError: the trainer is out of memory",
            "2",
        ]


def test_a_receiver_that_stops_early_blocks_no_process(ranks: RankPool) -> None:
    _, all_, some = ranks.run("stop_early", state(seed=0), size=3)
    assert all_ == [7, 7, 7, 7, 7]
    assert some == [0, 1, 1, 7, 1]


def test_a_buffer_is_reused_if_asked_for(ranks: RankPool) -> None:
    tensors = {f"w{i}": torch.full((64,), i) for i in range(5)}
    _, reused, kept = ranks.run("reuse", tensors, size=3)
    assert all(is_right for is_right, _ in (*reused, *kept))
    assert len({memory for _, memory in reused}) == 1
    assert len({memory for _, memory in kept}) == 5


def test_a_sender_that_dies_is_noticed(rank_server: RankServer, tmp_path: Path) -> None:
    with rank_server.pool(3) as pool:
        pool.start("be_killed", str(tmp_path), ranks=range(3))
        deadline_s = time.monotonic() + 300
        while not (tmp_path / "sent").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        pool.kill(0)
        outcomes = pool.collect([1, 2], timeout_s=300)
    assert [outcome["value"] for outcome in outcomes] == [["PeerLostError"] * 2] * 2
