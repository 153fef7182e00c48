"""What a packed row holds: no padding, each shared prompt once, no token that predicts nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_oracles import Group, groups, make_samples

from gcore_trainer.packing import pack


@settings(max_examples=50)
@given(lengths=groups, share_prefix=st.booleans(), seed=st.integers(0, 10**6))
def test_the_row_predicts_every_response_token_from_its_predecessor(
    lengths: list[Group], share_prefix: bool, seed: int
) -> None:
    samples = make_samples(lengths, seed=seed)
    batch = pack(samples, share_prefix=share_prefix)
    ids = np.concatenate([np.append(s.prompt_ids[-1], s.response_ids[:-1]) for s in samples])
    places = np.concatenate([s.prompt_ids.size - 1 + np.arange(s.response_ids.size) for s in samples])
    assert (batch.input_ids[batch.predict_index][batch.target_place] == ids).all()
    assert (batch.positions[batch.predict_index][batch.target_place] == places).all()
    assert (batch.target_ids == np.concatenate([s.response_ids for s in samples])).all()


@pytest.mark.parametrize(("share_prefix", "num_tokens"), [(True, 40 + 7 + 0 + 2 + 5 + 2), (False, 3 * 40 + 9 + 5 + 2)])
def test_a_shared_prompt_is_computed_once(share_prefix: bool, num_tokens: int) -> None:
    samples = make_samples([Group(40, [8, 1, 3]), Group(5, [3])], seed=0)
    assert pack(samples, share_prefix=share_prefix).input_ids.size == num_tokens


@settings(max_examples=50)
@given(lengths=groups, seed=st.integers(0, 10**6))
def test_every_packed_token_stands_once_in_the_buckets(lengths: list[Group], seed: int) -> None:
    batch = pack(make_samples(lengths, seed=seed))
    queries = np.concatenate([bucket.query_index.ravel() for bucket in batch.buckets])
    assert (queries[batch.unpack_index] == np.arange(batch.input_ids.size)).all()


def test_buckets_pad_to_less_than_twice_their_shortest() -> None:
    lengths = [Group(p, [r, r + 1]) for p in (20, 70, 300) for r in (20, 70, 300)]
    for bucket in pack(make_samples(lengths, seed=0)).buckets:
        if bucket.prompt_lengths is not None:
            num_prompt_keys = bucket.key_index.shape[1] - bucket.query_index.shape[1]
            assert num_prompt_keys < 2 * bucket.prompt_lengths.min()
