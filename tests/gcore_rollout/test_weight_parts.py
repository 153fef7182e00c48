"""Weights that several ranks send together: each tensor is sent once, evenly, and no rank holds all of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from rank_pool import RankServer, serving_ranks

from gcore_rollout import DigestedWeights, SharedWeights, divide_weights, write_part

DTYPES = [torch.float32, torch.bfloat16, torch.int8]

models = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 30), max_size=3)), max_size=12
)


def tensors(model: list[tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    return {
        f"w{i}": (torch.arange(torch.Size(s).numel()) % 100 + i).to(d).view(s)
        for i, (d, s) in enumerate(model)
    }


@given(models, st.integers(1, 5))
def test_each_tensor_is_sent_by_one_rank_and_all_send_about_as_much(
    model: list[tuple[torch.dtype, list[int]]], num_ranks: int
) -> None:
    weights = tensors(model)
    parts = [
        dict(divide_weights(weights.items(), rank=rank, num_ranks=num_ranks))
        for rank in range(num_ranks)
    ]
    assert all(list(part) == list(weights) for part in parts)
    for name, tensor in weights.items():
        [sent] = [part[name] for part in parts if not part[name].is_meta]
        assert sent is tensor
    sent_bytes = [
        sum(tensor.nbytes for tensor in part.values() if not tensor.is_meta) for part in parts
    ]
    assert max(sent_bytes) - min(sent_bytes) <= max(
        (tensor.nbytes for tensor in weights.values()), default=0
    )


def test_a_layer_is_sent_by_one_rank() -> None:
    """Whole layers, to ranks that have sent the least; what has no number is as a layer of its own."""
    sizes = {
        "embed": 50,
        "h.0.a": 40,
        "h.0.x.7.b": 30,
        "h.1.a": 60,
        "h.1.b": 5,
        "h.10.a": 9,
        "norm": 1,
    }
    weights = {name: torch.zeros(size, dtype=torch.int8) for name, size in sizes.items()}
    sent: list[list[str]] = []
    for rank in range(3):
        part = divide_weights(weights.items(), rank=rank, num_ranks=3)
        sent.append([name for name, tensor in part if not tensor.is_meta])
    assert sent == [["embed", "h.10.a", "norm"], ["h.0.a", "h.0.x.7.b"], ["h.1.a", "h.1.b"]]


@given(st.lists(models, min_size=1, max_size=3), st.integers(1, 4))
def test_what_ranks_write_together_is_read(
    updates: list[list[tuple[torch.dtype, list[int]]]], num_ranks: int
) -> None:
    """Over the same memory again, with the digests of all parts, as if one had written all."""
    shared, alone = SharedWeights(), SharedWeights()
    for model in updates:
        weights = tensors(model)
        of_ranks = FromRanks(weights, num_ranks)
        shared.write(of_ranks)
        alone.write(DigestedWeights(weights.items()))
        assert shared.digests == alone.digests
        assert shared.layout == alone.layout
        read = dict(shared)
        assert all(
            read[name].dtype == t.dtype and torch.equal(read[name], t)
            for name, t in weights.items()
        )
    shared.close()
    alone.close()


class FromRanks:
    """Ranks that write their parts one after the other, the last rank first."""

    def __init__(self, weights: dict[str, torch.Tensor], num_ranks: int) -> None:
        self._weights, self._num_ranks = weights, num_ranks
        self.digests: dict[str, object] = {}

    def write_to(self, path: Path) -> object:
        layouts: list[object] = []
        for rank in reversed(range(self._num_ranks)):
            part = DigestedWeights(
                divide_weights(self._weights.items(), rank=rank, num_ranks=self._num_ranks)
            )
            layouts.append(write_part(part, path))
            self.digests |= part.digests
        assert all(layout == layouts[0] for layout in layouts)
        return layouts[0]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("they are written by the ranks")


def test_ranks_that_fail_leave_no_weights(tmp_path: Path) -> None:
    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        raise RuntimeError("rank 1 was killed")

    shared = SharedWeights()
    of_ranks = FromRanks({}, 1)
    of_ranks.write_to = lambda path: write_part(failing(), path)
    with pytest.raises(RuntimeError, match="rank 1 was killed"):
        shared.write(of_ranks)
    assert not shared.is_whole
    shared.write([("a", torch.ones(4))])
    assert torch.equal(dict(shared)["a"], torch.ones(4))
    shared.close()


@pytest.fixture(scope="module")
def rank_server() -> Iterator[RankServer]:
    with serving_ranks(Path(__file__).with_name("weight_part_cases.py")) as server:
        yield server


@pytest.mark.slow
def test_no_rank_holds_more_than_its_shards_and_a_tensor(
    rank_server: RankServer, tmp_path: Path
) -> None:
    """A model of 96 MB in tensors of 6 MB over three ranks; gathering one takes up to five tensors."""
    path, num_tensors, num_rows, size = tmp_path / "weights", 16, 6000, 3
    path.touch()
    ranks = rank_server.shared(size)
    ranks.run("write_shards", str(path), 1, num_rows, size, size=size)  # the libraries' own buffers
    runs = [
        ranks.run("write_shards", str(path), num_tensors, num_rows, size, size=size)
        for _ in range(3)
    ]
    tensor_mb = num_rows * 250 * 4 / 1e6
    # What else takes memory meanwhile does so in one run, not in all of them.
    for outcomes in zip(*runs, strict=True):
        for layout, size_bytes, private_mb, _ in outcomes:
            assert len(layout) == num_tensors
            assert size_bytes == num_tensors * num_rows * 1000
            assert tensor_mb * 0.9 < private_mb, outcomes
        assert min(private_mb for *_, private_mb, _ in outcomes) < 5 * tensor_mb, outcomes
        assert min(resident_mb for *_, resident_mb in outcomes) < 5 * tensor_mb, outcomes
    values = torch.from_file(str(path), size=num_tensors * num_rows * 250).view(
        num_tensors, size, -1
    )
    expected = 10.0 * torch.arange(num_tensors)[:, None] + torch.arange(size)
    assert torch.equal(values.amin(2), expected)
    assert torch.equal(values.amax(2), expected)
