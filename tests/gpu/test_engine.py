"""The `hf` engine against the trainer, before and after new weights, and after it has slept."""

import asyncio
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_cases import VOCAB_SIZE, load_packed, make_samples, make_trainer, receive

from gcore_rollout import Completion, HFEngine, Request, SamplingParams
from gcore_rollout.weight_sync.shared_weights import SharedCudaWeights
from gcore_trainer import Sample

# Mean and largest difference of log-probabilities.
BOUNDS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (0.02, 0.2)}


def make_requests() -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            request_id=str(length),
            prompt_token_ids=tuple(rng.integers(2, VOCAB_SIZE, length).tolist()),
            sampling=SamplingParams(max_tokens=24),
            n=3,
            seed=length,
        )
        for length in (2, 17, 40)
    ]


def load_engine(path: Path, device: str, dtype: torch.dtype = torch.float32) -> HFEngine:
    return HFEngine.from_pretrained(path, device=device, dtype=dtype, max_num_seqs=8)


def generate(engine: HFEngine) -> list[Completion]:
    async def collected() -> list[Completion]:
        return [completion async for completion in engine.generate(make_requests())]

    return sorted(asyncio.run(collected()), key=lambda c: (c.request_id, c.index))


def as_samples(completions: list[Completion]) -> list[Sample]:
    prompts = {
        request.request_id: np.array(request.prompt_token_ids) for request in make_requests()
    }
    return [Sample(prompt_ids=prompts[c.request_id], response_ids=c.token_ids) for c in completions]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "window"])
def test_engine_and_trainer_agree(
    device: str, folders: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    completions = generate(load_engine(folders[name], device, dtype))
    [own] = load_packed(folders[name], device, dtype).log_probs([as_samples(completions)])
    mean, largest = BOUNDS[dtype]
    differences = np.concatenate(
        [np.abs(a - c.log_probs) for a, c in zip(own, completions, strict=True)]
    )
    assert differences.mean() <= mean
    assert differences.max() <= largest


def test_engine_computes_with_the_trainers_new_weights(
    device: str, folders: dict[str, Path]
) -> None:
    engine, trainer = load_engine(folders["qwen2"], device), make_trainer(folders["qwen2"], device)
    before = generate(engine)
    trainer.train_step([make_samples([(20, (30, 10, 15))])])
    asyncio.run(engine.update_weights(trainer.export_weights(), version=1))
    after = generate(engine)
    assert any(
        not np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, after, strict=True)
    )
    [own] = trainer.log_probs([as_samples(after)])
    for a, completion in zip(own, after, strict=True):
        np.testing.assert_allclose(a, completion.log_probs, rtol=1e-4, atol=1e-4)
        assert set(completion.weight_versions.tolist()) == {1}


def test_an_engine_wakes_as_it_was(device: str, folders: dict[str, Path]) -> None:
    engine = load_engine(folders["qwen2"], device)
    before = generate(engine)
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    for a, b in zip(before, generate(engine), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.log_probs.tolist() == b.log_probs.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: pytest -m gpu tests/gpu"
)
def test_another_process_reads_the_weights_by_cuda_ipc(folders: dict[str, Path]) -> None:
    trainer = make_trainer(folders["qwen2"], "cuda")
    weights = {name: tensor.bfloat16() for name, tensor in trainer.export_weights()}
    shared = SharedCudaWeights(weights.items())
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=receive, args=(other,))
    process.start()
    own.send_bytes(shared.handles())
    assert own.poll(120)
    seen = own.recv()
    process.join(60)
    shared.close()
    assert seen.keys() == weights.keys()
    for name, tensor in weights.items():
        np.testing.assert_array_equal(seen[name], tensor.float().cpu().numpy())
