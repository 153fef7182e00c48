"""What the `hf` engine promises beyond the rest: a request's result does not depend on what else is in the batch."""

from dataclasses import replace

import numpy as np
import pytest
from engine_oracles import TinyModel, collect, make_request
from gcore_rollout import Request
from gcore_rollout.errors import UnsupportedModelError
from gcore_rollout.hf_engine import HFEngine
from transformers import BloomConfig, BloomForCausalLM


def _crowd() -> list[Request]:
    return [
        make_request(f"c{i}", 1 + 13 * i, n=1 + i % 3, max_tokens=5 + 7 * i, temperature=0.5 * (i % 4)) for i in range(9)
    ]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 64])
async def test_result_does_not_depend_on_the_batch(tied: TinyModel, max_num_seqs: int) -> None:
    """Same tokens; log-probs up to rounding."""
    request = make_request("r", 21, n=3, max_tokens=40, temperature=0.8, seed=5)
    alone = await collect(HFEngine.from_pretrained(tied.path), request)
    crowd = _crowd()
    found = await collect(HFEngine.from_pretrained(tied.path, max_num_seqs=max_num_seqs), *crowd[:4], request, *crowd[4:])
    for key, expected in alone.items():
        assert found[key].token_ids.tolist() == expected.token_ids.tolist()
        assert found[key].finish_reason == expected.finish_reason
        np.testing.assert_allclose(found[key].log_probs, expected.log_probs, atol=1e-5, rtol=0)


async def test_result_does_not_depend_on_n(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path)
    request = make_request("r", 8, n=6, max_tokens=20)
    more = await collect(engine, request)
    fewer = await collect(engine, replace(request, n=2))
    assert all(more[key].token_ids.tolist() == c.token_ids.tolist() for key, c in fewer.items())


async def test_shared_prompt_is_computed_once(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path)
    await collect(engine, make_request("r", 30, n=10))
    assert engine.stats().prompt_tokens == 30


async def test_eos_token_ids_may_be_given(tied: TinyModel) -> None:
    engine = HFEngine.from_pretrained(tied.path, eos_token_ids=[])
    found = await collect(engine, make_request("r", 5, n=40, max_tokens=30))
    assert {len(c.token_ids) for c in found.values()} == {30}


def test_no_slots_are_refused(tied: TinyModel) -> None:
    with pytest.raises(ValueError, match="max_num_seqs is 0: at least 1 is needed"):
        HFEngine.from_pretrained(tied.path, max_num_seqs=0)
