"""Loss, gradients and advantages against TRL's `GRPOTrainer`: a real one, on the same model and the same tokens."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from trainer_oracles import (
    VOCAB_SIZE,
    Group,
    deviation,
    gradients,
    make_samples,
    off_policy,
    packed_gradients,
    split,
)
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from gcore_trainer import LossAggMode, PackedModel, PolicyLossConfig, Sample, grpo_advantages

NUM_GENERATIONS = 4
MAX_LENGTH = 40
SCORES = [[0.0, 1.0, 1.0, 3.0], [0.5, 0.25, 0.0, 0.25], [1.0, 1.0, 1.0, 1.0]]
TRL_EPSILON = 1e-4
"""Added to the standard deviation; a constant in TRL's source."""
LOSS_TYPES: dict[LossAggMode, str] = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:You are using 'rollout_func', which is an experimental:UserWarning"
    ),
]


@pytest.fixture(scope="module")
def trl() -> Iterator[Any]:
    """TRL without vLLM, which it would import (ten seconds) and warn about."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            import_module("trl.import_utils"), "is_vllm_available", lambda *_, **__: False
        )
        yield import_module("trl.trainer.grpo_trainer")


@pytest.fixture(scope="module")
def packed(llama: Path) -> PackedModel:
    return PackedModel.from_pretrained(llama, dtype=torch.float64)


@pytest.fixture(scope="module")
def samples(packed: PackedModel) -> list[Sample]:
    """Three groups in TRL's order: the responses to a prompt next to each other. Some tokens are masked out."""
    lengths = [Group(9, [20, 1, 9, 33]), Group(21, [7, 40, 13, 2]), Group(5, [3, 3, 8, 5])]
    in_order = [s for g, group in enumerate(lengths) for s in make_samples([group], seed=g)]
    scored = [
        replace(sample, advantages=np.full(sample.response_ids.size, advantage, np.float32))
        for sample, advantage in zip(
            in_order,
            np.concatenate([grpo_advantages(s, epsilon=TRL_EPSILON) for s in SCORES]),
            strict=True,
        )
    ]
    return off_policy(scored, packed, seed=0)


def make_trainer(
    trl: Any, folder: Path, output: Path, samples: list[Sample], **settings: Any
) -> Any:
    """A `GRPOTrainer` that is handed the samples as its rollouts and the scores as its rewards."""

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        del prompts, trainer
        return {
            "prompt_ids": [s.prompt_ids.tolist() for s in samples],
            "completion_ids": [s.response_ids.tolist() for s in samples],
            "logprobs": None,
            "env_mask": [
                np.broadcast_to(mask(s), s.response_ids.shape).astype(int).tolist() for s in samples
            ],
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        assert len(completions) == len(samples)
        return [x for group in SCORES for x in group]

    words = {f"t{i}": i for i in range(VOCAB_SIZE)}
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64),
        args=trl.GRPOConfig(
            output_dir=str(output),
            per_device_train_batch_size=len(samples),
            gradient_accumulation_steps=1,
            num_generations=NUM_GENERATIONS,
            max_completion_length=MAX_LENGTH,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            **settings,
        ),
        reward_funcs=reward,
        rollout_func=rollout,
        train_dataset=trl.Dataset.from_dict({"prompt": ["t1"] * len(samples)}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")),
            pad_token="t0",
            eos_token="t1",
        ),
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1  # as the training loop would set
    return trainer


def make_inputs(trainer: Any, samples: list[Sample]) -> dict[str, Any]:
    inputs: dict[str, Any] = trainer._generate_and_score_completions(
        [{"prompt": "t1"}] * len(samples)
    )
    return inputs


def mask(sample: Sample) -> Any:
    return True if sample.response_mask is None else sample.response_mask


def padded(arrays: list[Any]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True)


@pytest.mark.parametrize("loss_agg_mode", LOSS_TYPES)
@pytest.mark.parametrize("has_old_log_probs", [True, False])
@pytest.mark.parametrize(("beta", "clip_ratio_c"), [(0.0, None), (0.2, None), (0.0, 1.5)])
def test_loss_and_gradients(
    trl: Any,
    llama: Path,
    tmp_path: Path,
    packed: PackedModel,
    samples: list[Sample],
    loss_agg_mode: LossAggMode,
    has_old_log_probs: bool,
    beta: float,
    clip_ratio_c: float | None,
) -> None:
    trainer = make_trainer(
        trl,
        llama,
        tmp_path,
        samples,
        loss_type=LOSS_TYPES[loss_agg_mode],
        beta=beta,
        epsilon=0.2,
        epsilon_high=0.3,
        delta=clip_ratio_c,
        use_bias_correction_kl=False,  # DeepSeek-V3.2 (arXiv 2512.02556) weighs the KL by the ratio; GRPO does not
    )
    inputs = make_inputs(trainer, samples)
    if has_old_log_probs:
        inputs["old_per_token_logps"] = padded([s.old_log_probs for s in samples])
    if beta:
        inputs["ref_per_token_logps"] = padded([s.ref_log_probs for s in samples])
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    expected = gradients(trainer.model)
    clipped = trainer._metrics["train"]["clip_ratio/region_mean"][-1]
    assert (clipped > 0.1) == has_old_log_probs

    config = PolicyLossConfig(
        clip_ratio_low=0.2,
        clip_ratio_high=0.3,
        clip_ratio_c=clip_ratio_c,
        loss_agg_mode=loss_agg_mode,
        kl_loss_coef=beta,
        max_response_length=MAX_LENGTH,
    )
    ours = samples if has_old_log_probs else [replace(s, old_log_probs=None) for s in samples]
    actual_loss, actual = packed_gradients(packed, split(ours, seed=0), config)
    assert actual_loss == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
    assert (
        deviation(actual, expected) < 3e-6
    )  # TRL's fused head computes in float32, we in the model's float64


TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.02,
        "epsilon_high": 0.03,
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "sapo": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.4},
}
OUR_SETTINGS: dict[str, PolicyLossConfig] = {
    "gspo": PolicyLossConfig(
        loss_mode="gspo",
        clip_ratio_low=0.02,
        clip_ratio_high=0.03,
        loss_agg_mode="seq-mean-token-mean",
    ),
    "cispo": PolicyLossConfig(
        loss_mode="cispo", clip_ratio_low=1.0, clip_ratio_high=0.3, loss_agg_mode="token-mean"
    ),
    "sapo": PolicyLossConfig(loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"),
}


@pytest.mark.parametrize("mode", TRL_SETTINGS)
def test_other_policy_losses(
    trl: Any, llama: Path, tmp_path: Path, packed: PackedModel, samples: list[Sample], mode: str
) -> None:
    trainer = make_trainer(trl, llama, tmp_path, samples, beta=0.0, **TRL_SETTINGS[mode])
    inputs = make_inputs(trainer, samples)
    inputs["old_per_token_logps"] = padded([s.old_log_probs for s in samples])
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    expected = gradients(trainer.model)
    options = {"tau_neg": 1.4} if mode == "sapo" else {}
    actual_loss, actual = packed_gradients(
        packed, split(samples, seed=0), OUR_SETTINGS[mode], **options
    )
    assert actual_loss == pytest.approx(loss.item(), rel=1e-6, abs=1e-6)
    assert deviation(actual, expected) < 3e-6


@pytest.mark.parametrize(
    ("scale_rewards", "norm_adv_by_std_in_grpo"), [("group", True), ("none", False)]
)
def test_advantages(
    trl: Any,
    llama: Path,
    tmp_path: Path,
    samples: list[Sample],
    scale_rewards: str,
    norm_adv_by_std_in_grpo: bool,
) -> None:
    trainer = make_trainer(trl, llama, tmp_path, samples, scale_rewards=scale_rewards)
    expected = make_inputs(trainer, samples)["advantages"]
    actual = np.concatenate(
        [
            grpo_advantages(s, norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo, epsilon=TRL_EPSILON)
            for s in SCORES
        ]
    )
    torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=1e-6, atol=1e-6)
