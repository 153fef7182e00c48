"""Training on responses drawn by top-p and top-k: engine and trainer normalise over the same tokens."""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli, option_set, step_rows
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.evaluation.config import ValConfig
from gcore_llm.learning.config import AlgorithmConfig
from gcore_llm.learning.preparation import unscored_samples
from gcore_llm.sampling import engine_factory, sampling_params
from gcore_rollout import Completion, Engine, Group, Request, SamplingParams
from gcore_runs import UserError
from gcore_trainer import PackedModel, Sample

SAMPLING = SamplingParams(max_tokens=24, temperature=1.3, top_p=0.8, top_k=20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


async def generate(engine: Engine) -> list[Group]:
    """Groups of four responses to six prompts."""
    rng = np.random.default_rng(0)
    groups: list[Group] = []
    requests: list[Request] = []
    for i in range(6):
        prompt_ids = rng.integers(2, 97, 5 + i)
        prompt = tuple(prompt_ids.tolist())
        groups.append(Group(prompt_index=i, prompt_ids=prompt_ids))
        request = Request(
            request_id=str(i), prompt_token_ids=prompt, n=4, seed=i, sampling=SAMPLING
        )
        requests.append(request)
    completion: Completion
    async for completion in engine.generate(requests):
        groups[int(completion.request_id)].responses.append(completion)
    await engine.close()
    return groups


@torch.no_grad()
def by_hand(model: Any, sample: Sample) -> np.ndarray:
    """Log-probs in float64 by the warpers of transformers."""
    ids = torch.from_numpy(np.append(sample.prompt_ids, sample.response_ids))
    scores: Any = model(input_ids=ids[None]).logits[0, sample.prompt_ids.size - 1 : -1]
    scores = scores / SAMPLING.temperature
    for warper in (TopKLogitsWarper(SAMPLING.top_k), TopPLogitsWarper(SAMPLING.top_p)):
        scores = warper(None, scores)  # pyright: ignore[reportArgumentType] - it reads no ids
    targets = torch.from_numpy(sample.response_ids)[:, None]
    return scores.log_softmax(-1).gather(1, targets)[:, 0].numpy()


@pytest.mark.parametrize(
    "kind",
    [
        "hf",
        pytest.param(
            "vllm",
            marks=[
                pytest.mark.slow,
                pytest.mark.filterwarnings(
                    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
                    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
                ),
            ],
        ),
    ],
)
async def test_engine_and_trainer_have_the_distribution_of_transformers(
    kind: str, model: Path
) -> None:
    """Both are within rounding of the truncated distribution; without the sets the trainer is far from it."""
    options = {"kv_cache_memory_bytes": 64 << 20} if kind == "vllm" else {}
    rollout = RolloutConfig(
        engine=kind, top_p=0.8, top_k=20, temperature=1.3, engine_options=options
    )
    config = TrainConfig(model=str(model), rollout=rollout, device="cpu", dtype="float32")
    config = replace(config, data=replace(config.data, max_prompt_length=16))
    engine = engine_factory(config.rollout, config, model, eos_token_ids=[1])()
    groups = await generate(engine)
    micro_batches = [unscored_samples(group, AlgorithmConfig()) for group in groups]
    packed = PackedModel.from_pretrained(model, temperature=SAMPLING.temperature)
    samples = list(chain.from_iterable(micro_batches))
    ours = list(chain.from_iterable(packed.log_probs(micro_batches)))
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    for sample, log_probs in zip(samples, ours, strict=True):
        expected = by_hand(reference, sample)
        assert sample.rollout_log_probs is not None
        np.testing.assert_allclose(sample.rollout_log_probs, expected, rtol=0, atol=1e-5)
        np.testing.assert_allclose(log_probs, expected, rtol=0, atol=1e-5)
    whole = [replace(sample, kept_counts=None, kept_ids=None) for sample in samples]
    [untruncated] = packed.log_probs([whole])
    differences = np.concatenate(untruncated) - np.concatenate(ours)
    assert differences.mean() < -0.1


TOP_P = [
    *("--rollout.top-p", "0.7", "--rollout.top-k", "30", "--rollout.temperature", "1.2"),
    *("--actor.loss.kl-loss-coef", "0.01", "--trainer.save-freq", "1", "--actor.optim.lr", "1e-2"),
]


def same_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """The metrics that do not depend on the clock."""
    clocks = ("timing_s/", "perf/", "ledger/", "forecast/")
    return {name: value for name, value in row.items() if not name.startswith(clocks)}


def test_a_run_matches_its_engine_as_one_without_top_p_does(
    cli: Cli, own_args: list[str], chatty: Path
) -> None:
    """Responses continue in later steps and over a checkpoint, and the policy starts at the reference."""
    args = option_set(own_args, "--model", str(chatty))
    args = option_set(args, "--data.max-response-length", "32")
    args = [opt for opt in args if opt not in ("--actor.optim.lr", "1e-3")]
    args += [*TOP_P, "--rollout.partial-rollout", "True", "--rollout.over-sample-rate", "1"]
    args = option_set(args, "--trainer.total-training-steps", "4")
    cli.ok(*args, "--name", "whole")
    rows = step_rows(cli.cwd / "runs/whole")
    assert any(row["sampling/oldest_version"] < row["step"] - 1 for row in rows)
    assert all(row["training/rollout_k3_kl"] < 1e-8 for row in rows)
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in rows)
    assert rows[0]["training/rollout_distribution_kl"] < 1e-6
    assert abs(rows[0]["actor/kl_loss"]) < 1e-6 < rows[-1]["actor/kl_loss"]
    # The entropy is of 30 tokens at most.
    assert all(0 < row["actor/entropy"] < np.log(30) for row in rows)
    cli.ok(*option_set(args, "--trainer.total-training-steps", "2"), "--name", "parted")
    cli.ok(*args, "--name", "parted")
    for row, expected in zip(step_rows(cli.cwd / "runs/parted"), rows, strict=True):
        assert same_metrics(row) == same_metrics(expected)


SGLANG: dict[str, Any] = {"engine": "sglang", "engine_options": {"server_python": "python"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            SGLANG | {"top_p": 0.9},
            "rollout.top_p is 0.9; expected 1 with rollout.engine 'sglang', which does not return the tokens it kept; "
            "hf and vllm do",
        ),
        (
            SGLANG | {"top_k": 5},
            "rollout.top_k is 5; expected -1 with rollout.engine 'sglang'",
        ),
        (
            {"engine": "vllm", "top_p": 0.9},
            "rollout.top_k is -1; expected 1 or more with rollout.engine 'vllm' on a GPU",
        ),
        (
            {"engine": "vllm", "top_p": 0.9, "top_k": 50},
            "rollout.val_kwargs.top_k is -1; expected 1 or more with rollout.engine 'vllm' on a GPU",
        ),
        (
            {"top_k": 5, "multi_turn": {"environment": "e.py:make"}},
            "rollout.top_k is 5; expected -1 with several turns, which keep no sets of tokens",
        ),
    ],
)
def test_engines_without_sets_are_refused(fields: dict[str, Any], message: str) -> None:
    if "multi_turn" in fields:
        fields = fields | {
            "multi_turn": replace(RolloutConfig().multi_turn, **fields["multi_turn"])
        }
    with pytest.raises(UserError) as refused:
        TrainConfig(device="cuda", rollout=RolloutConfig(**fields))
    assert str(refused.value).startswith(message)


def test_vllm_on_a_gpu_is_taken_where_every_request_has_a_top_k() -> None:
    for val_kwargs in (ValConfig(top_k=20), ValConfig(n=0)):
        rollout = RolloutConfig(engine="vllm", top_p=0.9, top_k=50, val_kwargs=val_kwargs)
        assert sampling_params(TrainConfig(device="cuda", rollout=rollout)).truncates
