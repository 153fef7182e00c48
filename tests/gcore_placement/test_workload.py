"""Workload formulas against torch's own operation count, and against each other."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from numpy.testing import assert_allclose
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_placement import PlacementError, TransformerWorkload

TINY = TransformerWorkload(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=257,
)
CONFIG: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
}
lengths = st.integers(min_value=0, max_value=100_000)


@pytest.mark.parametrize("length", [16, 96])
def test_flops_match_what_torch_counts(length: int) -> None:
    config = Qwen2Config.from_dict(
        {**CONFIG, "attn_implementation": "eager", "tie_word_embeddings": False}
    )
    model = Qwen2ForCausalLM(config)
    token_ids = torch.zeros((1, length), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=token_ids, labels=token_ids, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    attention = counts.pop(torch.ops.aten.bmm)
    # Eager attention multiplies all L x L pairs and then masks; L (L + 1) / 2 of them are causal.
    expected = sum(counts.values()) + attention * (length + 1) / (2 * length)
    assert_allclose(TINY.flops(length), expected, rtol=0.02)


def test_flops_keep_the_shape_and_grow_with_the_square_of_the_length() -> None:
    flops = TINY.flops([[0, 1], [10, 1_000_000]])
    assert flops.shape == (2, 2)
    assert flops.dtype == np.float64
    assert flops[0, 0] == 0
    assert_allclose(flops[1, 1] / TINY.flops(500_000), 4, rtol=0.01)


@given(prompt=lengths, response=lengths)
def test_a_group_of_one_is_a_sequence(prompt: int, response: int) -> None:
    assert_allclose(TINY.group_flops(prompt, [response]), TINY.flops(prompt + response), rtol=1e-12)


@given(prompt=lengths, responses=st.lists(lengths, min_size=1, max_size=8))
def test_a_group_is_its_sequences_with_the_prompt_counted_once(
    prompt: int, responses: list[int]
) -> None:
    alone = TINY.flops(prompt + np.array(responses)).sum() - (len(responses) - 1) * TINY.flops(
        prompt
    )
    assert_allclose(TINY.group_flops(prompt, responses), alone, rtol=1e-9)


def test_groups_are_vectorised_and_padded_with_zero() -> None:
    groups = TINY.group_flops([7, 300], [[5, 9, 0], [1, 2, 3]])
    assert_allclose(groups, [TINY.group_flops(7, [5, 9]), TINY.group_flops(300, [1, 2, 3])])
    assert_allclose(TINY.group_flops(7, [[5], [6]]), [TINY.flops(12), TINY.flops(13)])
    assert TINY.group_flops(7, [5, 9]).shape == ()
    assert_allclose(TINY.group_flops(7, []), TINY.flops(7))


def test_config_is_read_with_transformers_defaults() -> None:
    assert TransformerWorkload.from_config(CONFIG) == TINY
    assert (
        TransformerWorkload.from_config({**CONFIG, "head_dim": None, "model_type": "qwen2"}) == TINY
    )
    assert TransformerWorkload.from_config({**CONFIG, "head_dim": 128}).head_dim == 128
    multi_head = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert TransformerWorkload.from_config(multi_head).num_key_value_heads == 4


@pytest.mark.parametrize("key", sorted(CONFIG.keys() - {"num_key_value_heads"}))
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(PlacementError, match=f"config has no '{key}'"):
        TransformerWorkload.from_config(
            {name: value for name, value in CONFIG.items() if name != key}
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0; expected an integer of at least 1"),
        ({"vocab_size": "257"}, "vocab_size is '257'; expected an integer of at least 1"),
        ({"num_hidden_layers": 3.0}, r"num_hidden_layers is .*; expected an integer"),
        ({"head_dim": True}, r"head_dim is .*; expected an integer"),
        (
            {"num_key_value_heads": 3},
            r"num_key_value_heads is 3; expected a divisor of num_attention_heads \(4\)",
        ),
        (
            {"hidden_size": 66},
            r"hidden_size \(66\) is not a multiple of num_attention_heads \(4\): give 'head_dim'",
        ),
        ({"n_routed_experts": 256}, "config has no 'num_experts_per_tok'"),
    ],
)
def test_a_wrong_config_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        TransformerWorkload.from_config({**CONFIG, **changed})


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(
        PlacementError, match=r"lengths\[1\] is -2.0; expected a finite number of at least 0"
    ):
        TINY.flops([1, -2])
    with pytest.raises(PlacementError, match=r"lengths is 0.5; expected whole numbers of tokens"):
        TINY.flops(0.5)
    with pytest.raises(
        PlacementError, match=r"response_lengths\[0, 1\] is .*; expected a finite number"
    ):
        TINY.group_flops(1, [[1, float("nan")]])
    with pytest.raises(
        PlacementError, match=r"response_lengths.shape is .*; expected prompt_length's shape \(2,\)"
    ):
        TINY.group_flops([1, 2], [1, 2])
