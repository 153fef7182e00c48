"""Tensors in shared memory: what is written is what is read, and nothing is written under a reader."""

import asyncio
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, strategies as st

from gcore_rollout import RolloutError
from gcore_rollout.weight_sync.shared_weights import SharedWeights, SharedWeightsReader

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
]


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.double(), b.double())


def num_memories(shared: SharedWeights) -> int:
    return len(shared._memories)  # pyright: ignore[reportPrivateUsage]


models = st.lists(
    st.builds(
        random_tensor,
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 40), max_size=3),
        st.integers(0, 1000),
    ),
    max_size=6,
)


@given(st.lists(models, min_size=1, max_size=3))
def test_what_is_written_is_read(updates: list[list[torch.Tensor]]) -> None:
    """Over the same memory, as it grows and is written again."""
    shared, reader = SharedWeights(), SharedWeightsReader()
    for tensors in updates:
        weights = {f"w{i}": tensor for i, tensor in enumerate(tensors)}
        shared.write(weights.items())
        for read in (dict(shared), dict(reader.read(os.dup(shared.fileno()), shared.layout))):
            assert list(read) == list(weights)
            assert all(same(read[name], tensor) for name, tensor in weights.items())
    shared.close()


def test_strides_and_gradients_do_not_matter() -> None:
    shared = SharedWeights()
    tensor = torch.arange(24.0).view(4, 6)
    parameter = torch.nn.Parameter(tensor.clone())
    shared.write(
        [("transposed", tensor.t()), ("every other", tensor[:, ::2]), ("parameter", parameter)]
    )
    read = dict(shared)
    assert torch.equal(read["transposed"], tensor.t())
    assert torch.equal(read["every other"], tensor[:, ::2])
    assert torch.equal(read["parameter"], tensor)
    assert not read["parameter"].requires_grad
    shared.close()


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    shared, reader = SharedWeights(), SharedWeightsReader()
    shared.write([("w", torch.ones(1000))])
    view = dict(reader.read(os.dup(shared.fileno()), shared.layout))["w"]
    shared.close()
    shared.close()
    del reader
    assert view.sum() == 1000
    with pytest.raises(RolloutError, match="there are no weights"):
        list(shared)
    with pytest.raises(RolloutError, match="the shared weights are closed"):
        shared.write([])


def test_weights_written_in_part_are_none() -> None:
    shared = SharedWeights()
    shared.write([("w", torch.ones(3))])

    def torn() -> Iterator[tuple[str, torch.Tensor]]:
        yield "w", torch.zeros(3)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        shared.write(torn())
    assert not shared.is_whole
    with pytest.raises(RolloutError, match="there are no weights"):
        list(shared)
    shared.write([("w", torch.ones(3))])
    assert shared.is_whole
    assert shared.num_writes == 3
    shared.close()


async def test_nothing_is_written_under_a_reader() -> None:
    """Nor is more memory kept than is read, and one to write to."""
    shared, loop = SharedWeights(), asyncio.get_running_loop()
    views: list[tuple[asyncio.Future[None], torch.Tensor]] = []
    for i in range(4):
        shared.write([("w", torch.full((3,), float(i)))])
        views.append((loop.create_future(), dict(shared)["w"]))
        shared.read_until(views[-1][0])
    assert [view.tolist() for _, view in views] == [[i] * 3 for i in range(4)]
    assert num_memories(shared) == 4
    for reader, _ in views[1:]:
        reader.set_result(None)
    await asyncio.sleep(0)
    shared.write([("w", torch.full((3,), 4.0))])
    assert num_memories(shared) == 2
    assert views[0][1].tolist() == [0] * 3
    with shared.reading():
        shared.write([("w", torch.full((3,), 5.0))])
        assert num_memories(shared) == 3
    assert dict(shared)["w"].tolist() == [5] * 3
    shared.close()
    assert views[0][1].tolist() == [0] * 3


def test_weights_are_made_one_by_one() -> None:
    """No more than one tensor of a generator is asked for at a time."""
    shared = SharedWeights()
    seen: list[float] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.zeros(10)
        for i in range(5):
            seen.append(float(buffer[0]))
            yield f"w{i}", buffer.fill_(i)

    shared.write(weights())
    assert [float(tensor[0]) for _, tensor in shared] == [0, 1, 2, 3, 4]
    assert seen == [0, 0, 1, 2, 3]
    shared.close()
