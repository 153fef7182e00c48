"""Advantages, loss and gradient of one batch, computed by the installed verl or TRL for the settings of a run."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
import tyro

from gcore_llm.config import TrainConfig
from gcore_llm.migration.conversion import Conversion
from gcore_llm.migration.fixed_batch import (
    NUM_PROMPTS,
    BatchResult,
    FixedBatch,
    computed_here,
    part_weights,
)
from gcore_runs import Checked, NonNegative, UserError, parse_arguments
from gcore_runs.command_line import print_table

_EQUAL = 1e-5
"""Largest difference, relative to the largest entry, of what is called equal: ours is float32 in part."""
_VERL_ACTOR = "actor_rollout_ref.actor."
_TRL_LOSS = (
    "loss_type",
    "scale_rewards",
    "beta",
    "entropy_coef",
    "epsilon",
    "epsilon_high",
    "delta",
)
"""Options of TRL's loss that are taken from its own config."""
_LOSS_TYPES = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
}


@dataclass(frozen=True, kw_only=True)
class CompareArgs(Checked):
    """Compute advantages, loss and gradient of one made-up batch here and in an installed library."""

    library: tyro.conf.Positional[Literal["verl", "trl"]]
    """verl or trl, which has to be installed."""
    config: tyro.conf.Positional[str]
    """A config of the library, as from-verl and from-trl take it, which is then computed with its own values; or
    settings of gcore-llm train."""
    root: str = ""
    """Folder in which a script is started, as for from-verl."""
    seed: NonNegative = 0
    """Seed of the batch."""


def compare_with(args: Sequence[str], parse: Callable[[Sequence[str]], TrainConfig]) -> None:
    """Print a table of both results and their largest differences; ``parse`` reads options of train."""
    parsed = parse_arguments(CompareArgs, args, prog="gcore-llm compare-with")
    if find_spec(parsed.library) is None:
        raise UserError(f"{parsed.library} is not installed: pip install {parsed.library}")
    original: Mapping[str, Any] = {}
    if Path(parsed.config).suffix == ".toml":
        config = parse(["--config", parsed.config])
    else:
        conversion = _convert(parsed)
        config = conversion.result()
        original = conversion.values
        _print_remainder(conversion)
    if not isinstance(config, TrainConfig):
        raise UserError(f"config is {parsed.config}; expected settings of gcore-llm train")
    batch = FixedBatch.of(config, seed=parsed.seed)
    ours = computed_here(config, batch)
    compute = computed_by_verl if parsed.library == "verl" else computed_by_trl
    theirs = compute(config, batch, original)
    rows: list[tuple[str, ...]] = []
    for name, here, there, gap in differences(ours, theirs):
        verdict = "equal" if gap <= _EQUAL else "differs"
        rows.append(
            (name, f"{np.abs(here).max():.6g}", f"{np.abs(there).max():.6g}", f"{gap:.1e}", verdict)
        )
    columns = (
        "of one batch",
        "largest here",
        f"largest in {parsed.library}",
        "largest difference",
        "",
    )
    print_table(f"{len(batch.lengths)} responses, {sum(batch.lengths)} tokens", columns, [rows])


def _convert(args: CompareArgs) -> Conversion:
    """Convert the library's own config."""
    from gcore_llm.migration.inputs import read_config
    from gcore_llm.migration.trl import convert_trl_config
    from gcore_llm.migration.verl import convert_verl_config

    source = read_config(args.config, (), args.root)
    if args.library == "verl":
        return convert_verl_config(source)
    return convert_trl_config(source, "auto")


def _print_remainder(conversion: Conversion) -> None:
    """Print what the settings of the run do not have of the config: no batch shows all of it."""
    for line in conversion.lines():
        if line.verdict in ("missing", "unknown"):
            print(f"{line.verdict}: {line.key} = {line.value}: {line.text}")
    for caution in conversion.cautions:
        print(f"caution: {caution}")


def differences(ours: BatchResult, theirs: BatchResult) -> list[tuple[str, Any, Any, float]]:
    """Return advantages, loss and gradient, each of both, with the largest difference relative to the largest entry."""
    rows: list[tuple[str, Any, Any, float]] = []
    for name in ("advantages", "loss", "gradient"):
        here = np.asarray(getattr(ours, name))
        there = np.asarray(getattr(theirs, name))
        scale = max(float(np.abs(there).max()), 1e-12)
        rows.append((name, here, there, float(np.abs(here - there).max()) / scale))
    return rows


def computed_by_verl(
    config: TrainConfig, batch: FixedBatch, original: Mapping[str, Any] | None = None
) -> BatchResult:
    """Return what verl's own functions make of the batch, called as its trainer calls them.

    Values of the loss are those of ``original``, verl's own by dotted name, where it has them.
    """
    theirs = {name.removeprefix(_VERL_ACTOR): value for name, value in (original or {}).items()}
    algos: Any = import_module("verl.trainer.ppo.core_algos")
    loss = config.actor.loss
    options = config.algorithm.loss_options(loss.loss_mode)
    del options["echo_coef"]
    for name, value in options.items():
        options[name] = theirs.get(name, theirs.get(f"policy_loss.{name}", value))
    temperatures = {name: options.pop(name) for name in ("tau_pos", "tau_neg") if name in options}
    mask = batch.mask
    old = batch.pad(batch.old)
    reference = batch.pad(batch.reference)
    rewards = torch.zeros_like(mask)
    rewards[range(len(batch.lengths)), [length - 1 for length in batch.lengths]] = torch.from_numpy(
        batch.scores
    )
    kl = config.algorithm.kl_ctrl
    if kl.kl_coef:
        rewards = rewards - kl.kl_coef * algos.kl_penalty(old, reference, kl.kl_penalty) * mask
    advantages = _verl_advantages(algos, config, batch, rewards)
    weights = None
    if config.algorithm.rollout_correction.is_active:
        weights, mask = _verl_correction(config, old, batch.pad(batch.rollout), mask)
    current = batch.pad(batch.current).requires_grad_()
    count = len(batch.lengths)
    mode = theirs.get("loss_agg_mode", loss.loss_agg_mode)
    scale = {"loss_scale_factor": loss.max_response_length or config.data.max_response_length}
    module: Any = import_module("verl.workers.config.actor")
    actor = module.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=theirs.get("clip_ratio_low", loss.clip_ratio_low),
        clip_ratio_high=theirs.get("clip_ratio_high", loss.clip_ratio_high),
        clip_ratio_c=theirs.get("clip_ratio_c", loss.clip_ratio_c or 1e6),
        policy_loss=module.PolicyLossConfig(**options),
        **temperatures,
    )
    actor.global_batch_info.update(global_batch_size=count, **scale)
    policy = algos.get_policy_loss_fn(theirs.get("policy_loss.loss_mode", loss.loss_mode))
    total, _ = policy(old, current, advantages, mask, mode, actor, weights)
    divergence = algos.kl_penalty(current, reference, loss.kl_loss_type)
    for weight, term in (
        (loss.kl_loss_coef, divergence),
        (-loss.entropy_coeff, batch.pad(batch.entropies)),
    ):
        total = total + weight * algos.agg_loss(term, mask, mode, global_batch_size=count, **scale)
    (gradient,) = torch.autograd.grad(total, current)
    return BatchResult(
        advantages=batch.flat(advantages), loss=total.item(), gradient=batch.flat(gradient)
    )


def _verl_advantages(
    algos: Any, config: TrainConfig, batch: FixedBatch, rewards: torch.Tensor
) -> torch.Tensor:
    algorithm = config.algorithm
    name = algorithm.adv_estimator
    options = algorithm.advantage_options
    if name == "gae":
        values = batch.pad(batch.values)
        return algos.compute_gae_advantage_return(
            rewards, values, batch.mask, options["gamma"], options["lam"]
        )[0]
    arguments: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": batch.mask}
    if name == "remax":
        arguments["reward_baselines"] = torch.from_numpy(np.repeat(batch.greedy_scores, batch.n))
    elif name == "reinforce_plus_plus":
        arguments["config"] = SimpleNamespace(gamma=options["gamma"])
    else:
        arguments["index"] = np.repeat(np.arange(NUM_PROMPTS), batch.n)
    if name in ("grpo", "dr_grpo", "gdpo", "grpo_passk"):
        is_normed = options.get("norm_adv_by_std_in_grpo", False)
        arguments["norm_adv_by_std_in_grpo"] = is_normed
        weights = part_weights(config)
        arguments["config"] = {
            "norm_adv_by_std_in_grpo": is_normed,
            "gdpo_reward_keys": [*weights],
            "gdpo_reward_weights": [*weights.values()],
        }
        name = name.removeprefix("dr_")
    if name == "gdpo":
        arguments["non_tensor_batch"] = batch.parts
        arguments["batch"] = {"prompts": batch.mask[:, :0], "attention_mask": batch.mask.long()}
    if name not in algos.ADV_ESTIMATOR_REGISTRY:
        raise UserError(
            f"algorithm.adv_estimator is {name!r}; expected an estimator that verl has, too"
        )
    return algos.get_adv_estimator_fn(name)(**arguments)[0]


def _verl_correction(
    config: TrainConfig, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    correction = config.algorithm.rollout_correction
    rule = correction.rollout_rs
    if rule and rule.endswith(("_kl", "_tv")):
        raise UserError(
            f"algorithm.rollout_correction.rollout_rs is {rule!r}; expected a divergence that verl has, too"
        )

    def bounds(upper: float | None, lower: float | None) -> Any:
        return upper if lower is None else f"{lower}_{upper}"

    correct: Any = import_module(
        "verl.trainer.ppo.rollout_corr_helper"
    ).compute_rollout_correction_and_rejection_mask
    weights, accepted_mask, _ = correct(
        old,
        rollout,
        mask,
        rollout_is=correction.rollout_is,
        rollout_is_threshold=bounds(
            correction.rollout_is_threshold, correction.rollout_is_threshold_lower
        ),
        rollout_is_batch_normalize=correction.rollout_is_batch_normalize,
        rollout_rs=rule,
        rollout_rs_threshold=bounds(
            correction.rollout_rs_threshold, correction.rollout_rs_threshold_lower
        ),
    )
    if weights is not None:
        weights = weights.batch["rollout_is_weights"]
    return weights, accepted_mask


def computed_by_trl(
    config: TrainConfig, batch: FixedBatch, original: Mapping[str, Any] | None = None
) -> BatchResult:
    """Return what TRL's `GRPOTrainer` makes of the batch: a real one on a tiny model, given the log-probabilities.

    Options of the loss are those of ``original``, TRL's own by name, where it has them.
    """
    options = _trl_options(config)
    if original:
        if "epsilon_high" not in original:
            # Without it, TRL takes epsilon.
            options.pop("epsilon_high", None)
        options |= {name: original[name] for name in _TRL_LOSS if name in original}
    trl = _trl_without_vllm()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gcore_llm.tiny_model import make_tiny_model

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        del prompts, trainer
        completions = [[2] * length for length in batch.lengths]
        return {
            "prompt_ids": [[2]] * len(completions),
            "completion_ids": completions,
            "logprobs": None,
        }

    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", seed=0)
        trainer: Any = trl.GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(Path(folder) / "model"),
            args=trl.GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=len(batch.lengths),
                gradient_accumulation_steps=1,
                num_generations=batch.n,
                max_completion_length=config.data.max_response_length,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                use_bias_correction_kl=False,
                **options,
            ),
            reward_funcs=lambda **_: batch.scores.tolist(),
            rollout_func=rollout,
            train_dataset=trl.Dataset.from_dict({"prompt": ["1"] * len(batch.lengths)}),
            processing_class=AutoTokenizer.from_pretrained(Path(folder) / "model"),
        )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs: dict[str, Any] = trainer._generate_and_score_completions(
        [{"prompt": "1"}] * len(batch.lengths)
    )
    current = batch.pad(batch.current).requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
        current,
        batch.pad(batch.entropies),
        None,
    )
    inputs["old_per_token_logps"] = batch.pad(batch.old)
    inputs["ref_per_token_logps"] = batch.pad(batch.reference)
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, current)
    advantages = np.repeat(inputs["advantages"].double().numpy(), batch.lengths)
    return BatchResult(advantages=advantages, loss=loss.item(), gradient=batch.flat(gradient))


def _trl_without_vllm() -> Any:
    """Import TRL's GRPO trainer without vLLM, which it would import for many seconds, and warn about."""
    utils: Any = import_module("trl.import_utils")
    before = utils.is_vllm_available
    utils.is_vllm_available = lambda *_, **__: False
    try:
        return import_module("trl.trainer.grpo_trainer")
    finally:
        utils.is_vllm_available = before


def _trl_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of `GRPOConfig` that mean these settings; `UserError` if there are none."""
    algorithm = config.algorithm
    loss = config.actor.loss
    unfit = {
        f"algorithm.adv_estimator is {algorithm.adv_estimator!r}": algorithm.adv_estimator
        not in ("grpo", "dr_grpo"),
        f"actor.loss.loss_agg_mode is {loss.loss_agg_mode!r}": loss.loss_agg_mode
        not in _LOSS_TYPES,
        f"actor.loss.kl_loss_type is {loss.kl_loss_type!r}": loss.kl_loss_coef > 0
        and loss.kl_loss_type != "k3",
        "algorithm.rollout_correction corrects": algorithm.rollout_correction.is_active,
    }
    for reason, is_unfit in unfit.items():
        if is_unfit:
            raise UserError(
                f"{reason}; expected grpo, an aggregation of GRPO, DAPO or Dr. GRPO, k3 and no correction"
            )
    is_normed = algorithm.advantage_options.get("norm_adv_by_std_in_grpo", False)
    options: dict[str, Any] = {
        "scale_rewards": "group" if is_normed else "none",
        "loss_type": _LOSS_TYPES[loss.loss_agg_mode],
        "beta": loss.kl_loss_coef,
        "entropy_coef": loss.entropy_coeff,
        "epsilon": loss.clip_ratio_low,
        "epsilon_high": loss.clip_ratio_high,
    }
    match loss.loss_mode:
        case "vanilla":
            options["delta"] = loss.clip_ratio_c
        case "gspo":
            options["importance_sampling_level"] = "sequence"
        case "cispo":
            options |= {"loss_type": "cispo", "epsilon_high": 1.0 + loss.clip_ratio_high}
        case "sapo":
            options["loss_type"] = "sapo"
            taus = algorithm.loss_options("sapo")
            options["sapo_temperature_pos"] = taus["tau_pos"]
            options["sapo_temperature_neg"] = taus["tau_neg"]
        case _:
            raise UserError(
                f"actor.loss.loss_mode is {loss.loss_mode!r}; expected vanilla, gspo, cispo or sapo"
            )
    return options
