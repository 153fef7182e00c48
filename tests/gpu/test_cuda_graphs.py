"""The `hf` engine's CUDA graphs against its dynamic shapes, on the same GPU."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_rollout import Completion, HFEngine, Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="needs a CUDA device: pytest -m gpu tests/gpu runs it there",
    ),
]

CONFIG = Qwen2Config(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=0.1,
    eos_token_id=1,
    bos_token_id=None,
)


def _requests(temperature: float) -> list[Request]:
    """Samples of many lengths, more than there are slots, with up to 600 keys."""
    rng = np.random.default_rng(0)
    return [
        Request(
            request_id=str(i),
            prompt_token_ids=tuple(rng.integers(2, 1000, 5 + 40 * i).tolist()),
            sampling=SamplingParams(max_tokens=20 + 25 * i, temperature=temperature),
            n=1 + i % 4,
            seed=i,
        )
        for i in range(8)
    ]


def _generate(engine: HFEngine, requests: list[Request]) -> dict[tuple[str, int], Completion]:
    async def found() -> dict[tuple[str, int], Completion]:
        return {(c.request_id, c.index): c async for c in engine.generate(requests)}

    return asyncio.run(found())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graphs_draw_the_tokens_of_dynamic_shapes(tmp_path: Path, temperature: float) -> None:
    """In float32: from the start, after new weights, and after a sleep; rounding may decide a few draws."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(CONFIG).save_pretrained(tmp_path)
    new = Qwen2ForCausalLM(CONFIG).state_dict()
    options: Any = {"device": "cuda", "max_num_seqs": 12, "eos_token_ids": [1]}
    dynamic = HFEngine.from_pretrained(tmp_path, decode_mode="dynamic", **options)
    graphs: Any = HFEngine.from_pretrained(tmp_path, **options)
    requests = _requests(temperature)
    for stage in ("start", "new weights", "sleep"):
        if stage == "new weights":
            for engine in (dynamic, graphs):
                asyncio.run(engine.update_weights(new.items(), version=1))
        elif stage == "sleep":
            asyncio.run(graphs.sleep())
            asyncio.run(graphs.wake())
        recorded = dict(graphs._decoder._graphs._graphs)
        expected, found = _generate(dynamic, requests), _generate(graphs, requests)
        same = [
            found[key].token_ids.tolist() == c.token_ids.tolist() for key, c in expected.items()
        ]
        assert np.mean(same) >= 0.9
        for (key, completion), is_same in zip(expected.items(), same, strict=True):
            if is_same:
                np.testing.assert_allclose(
                    found[key].log_probs, completion.log_probs, atol=1e-4, rtol=0
                )
        if stage == "new weights":
            # Weights are replaced where graphs read them.
            assert recorded
            assert graphs._decoder._graphs._graphs == recorded
