"""What a packed row holds: no padding, each shared prompt once, no token that predicts nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from trainer_oracles import Group, groups, make_samples

from gcore_trainer import ConfigError
from gcore_trainer.packing.layout import PackedBatch, pack


@settings(max_examples=50)
@given(lengths=groups, share_prefix=st.booleans(), seed=st.integers(0, 10**6))
def test_the_row_predicts_every_response_token_from_its_predecessor(
    lengths: list[Group], share_prefix: bool, seed: int
) -> None:
    samples = make_samples(lengths, seed=seed)
    batch = pack(samples, share_prefix=share_prefix)
    ids = np.concatenate([np.append(s.prompt_ids[-1], s.response_ids[:-1]) for s in samples])
    places = np.concatenate(
        [s.prompt_ids.size - 1 + np.arange(s.response_ids.size) for s in samples]
    )
    assert (batch.input_ids[batch.predict_index][batch.target_place] == ids).all()
    assert (batch.positions[batch.predict_index][batch.target_place] == places).all()
    assert (batch.target_ids == np.concatenate([s.response_ids for s in samples])).all()


@pytest.mark.parametrize(
    ("share_prefix", "num_tokens"), [(True, 40 + 7 + 0 + 2 + 5 + 2), (False, 3 * 40 + 9 + 5 + 2)]
)
def test_a_shared_prompt_is_computed_once(share_prefix: bool, num_tokens: int) -> None:
    samples = make_samples([Group(40, [8, 1, 3]), Group(5, [3])], seed=0)
    assert pack(samples, share_prefix=share_prefix).input_ids.size == num_tokens


@settings(max_examples=50)
@given(lengths=groups, share_prefix=st.booleans(), seed=st.integers(0, 10**6))
def test_segments_make_up_the_row_and_branches_of_a_prompt_follow_it(
    lengths: list[Group], share_prefix: bool, seed: int
) -> None:
    batch = pack(make_samples(lengths, seed=seed), share_prefix=share_prefix)
    end, prompt = 0, None
    for segment in batch.segments:
        assert segment.start == end
        assert segment.parent in (None, prompt)
        end += segment.length
        prompt = segment if segment.parent is None else prompt
    assert end == batch.input_ids.size


@settings(max_examples=50)
@given(
    lengths=groups,
    share_prefix=st.booleans(),
    multiple_of=st.integers(1, 12),
    segment_multiple_of=st.integers(1, 12),
    seed=st.integers(0, 10**6),
)
def test_padding_stands_where_no_real_token_sees_it(
    lengths: list[Group], share_prefix: bool, multiple_of: int, segment_multiple_of: int, seed: int
) -> None:
    if share_prefix:
        segment_multiple_of = 1
    samples = make_samples(lengths, seed=seed)
    plain = pack(samples, share_prefix=share_prefix)
    batch = pack(
        samples,
        share_prefix=share_prefix,
        multiple_of=multiple_of,
        segment_multiple_of=segment_multiple_of,
    )
    assert batch.input_ids.size % multiple_of == 0
    assert (batch.segment_lengths % segment_multiple_of == 0).all()
    assert batch.segment_lengths.sum() == batch.input_ids.size
    # What is read of the row does not change.
    assert (batch.target_ids == plain.target_ids).all()
    assert seen(batch) == seen(plain)


def seen(batch: PackedBatch) -> list[list[tuple[int, int]]]:
    """The tokens, and their positions, that each response token is predicted from."""
    tokens = list(zip(batch.input_ids.tolist(), batch.positions.tolist(), strict=True))
    by_query: list[list[tuple[int, int]]] = []
    for segment in batch.segments:
        sequence = [tokens[i] for i in segment.sequence]
        by_query += [sequence[: segment.context_length + i + 1] for i in range(segment.length)]
    return [by_query[i] for i in batch.predict_index[batch.target_place].tolist()]


def test_padding_fills_segments_and_a_last_one_of_its_own() -> None:
    batch = pack(make_samples([Group(3, [3]), Group(6, [3])], seed=0), share_prefix=False)
    first, second = np.split(batch.input_ids, batch.segment_lengths[:1])
    padded = pack(
        make_samples([Group(3, [3]), Group(6, [3])], seed=0),
        share_prefix=False,
        multiple_of=5,
        segment_multiple_of=4,
    )
    lengths = {5: 8, 8: 8}
    assert padded.segment_lengths.tolist() == [lengths[first.size], lengths[second.size], 4]
    assert padded.input_ids.tolist() == [
        *first,
        *[0] * (8 - first.size),
        *second,
        *[0] * (8 - second.size),
        0,
        0,
        0,
        0,
    ]
    positions = {5: [0, 1, 2, 3, 4, 4, 4, 4], 8: list(range(8))}
    assert padded.positions.tolist() == [
        *positions[first.size],
        *positions[second.size],
        0,
        1,
        2,
        3,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple_of": 0}, "multiple_of is 0; expected 1 or more"),
        (
            {"share_prefix": False, "segment_multiple_of": -1},
            "segment_multiple_of is -1; expected 1 or more",
        ),
        (
            {"segment_multiple_of": 2},
            "segment_multiple_of is 2 with share_prefix=True; expected False",
        ),
    ],
)
def test_multiples_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        pack(make_samples([Group(3, [3])], seed=0), **options)
