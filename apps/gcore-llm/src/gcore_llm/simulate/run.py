"""The program of `train` on a simulated cluster: its settings, its prompts, and the cost of a token."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gcore_controller import share_trainer
from gcore_llm.config import ActorConfig, AlgorithmConfig, DataConfig, RolloutConfig, TrainConfig, TrainerConfig
from gcore_llm.data.prompts import PromptSets
from gcore_llm.learning.preparation import sample_flops, workload_of
from gcore_llm.modality import Job, Roles, SamplingRoles
from gcore_placement import uniform
from gcore_rollout import Prompt
from gcore_runs.errors import UserError
from gcore_runs.simulation.cluster import SimulatedCluster, Simulation, StepFigures
from gcore_runs.simulation.config import SimulateConfig
from gcore_runs.simulation.services import CoarseWorkload, Replay, drawn_length
from gcore_trainer import PolicyLossConfig

_BUILT_IN = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152_064,
}
"""The shape of Qwen2.5-7B (arXiv 2412.15115, table 1, and its config.json)."""

_PROMPT_STREAM = 1
_NUM_PROMPTS = 10_000


def simulate(
    config: SimulateConfig, stepped: Callable[[StepFigures], None] = lambda _: None, *, replay: Replay | None = None
) -> Simulation:
    """Run the program of `train` on modelled services.

    Args:
        stepped: called after every step.
        replay: gives the lengths of responses, and the groups whose scores differ, in place of draws.

    Raises:
        UserError: the model folder has no config.json that loads, or settings do not fit `TrainConfig`.
    """
    workload = coarse_workload(config)
    cost_of = partial(sample_flops, workload)
    cluster = SimulatedCluster(config, workload, cost_of=cost_of, report=stepped, replay=replay)
    job = Job(
        config=train_config(config),
        prompts=make_prompts(config),
        workload=workload,
        first_step=0,
        is_evaluated=True,
        controllers=None,
        is_policy_behind=False,
    )
    roles = [
        SamplingRoles(policy=engine, policy_slots=slots, reward=cluster.reward, tokenizer=SampleNames())
        for engine, slots in cluster.engines()
    ]
    return cluster.run(share_trainer(cluster.learner, job.program(cluster), roles=Roles), roles)


def train_config(config: SimulateConfig) -> TrainConfig:
    """Return the settings of the program, with lengths in units of ``token_unit`` tokens.

    Raises:
        UserError: see `TrainConfig`.
    """
    return TrainConfig(
        seed=config.seed,
        controllers=config.controllers,
        device="cpu",
        data=DataConfig(
            train_batch_size=config.batch_size,
            max_prompt_length=config.max_prompt_length // config.token_unit,
            max_response_length=config.max_response_length // config.token_unit,
            shuffle_seed=config.seed,
        ),
        rollout=RolloutConfig(
            n=config.n, partial_rollout=config.partial_rollout, over_sample_rate=config.over_sample_rate
        ),
        algorithm=AlgorithmConfig(
            filter_groups=config.filter_groups,
            max_num_gen_batches=config.max_num_gen_batches,
            old_log_probs=config.old_log_probs,
            # Modelled engines and learners have no policy that could differ.
            max_rollout_kl=0.0,
        ),
        actor=ActorConfig(
            loss=PolicyLossConfig(kl_loss_coef=config.kl_loss_coef),
            ppo_mini_batch_size=config.ppo_mini_batch_size,
            ppo_max_token_len=config.ppo_max_token_len // config.token_unit,
        ),
        trainer=TrainerConfig(num_processes=config.devices, total_training_steps=config.steps),
    )


def coarse_workload(config: SimulateConfig) -> CoarseWorkload:
    """Return the cost model of the config's model, in its units.

    Raises:
        UserError: the model folder has no config.json that transformers knows.
    """
    if not config.model:
        return CoarseWorkload(**_BUILT_IN, token_unit=config.token_unit)
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise UserError(f"model is {config.model!r}; expected a Hugging Face folder with config.json")
    try:
        shape = workload_of(folder)
    except (ValueError, OSError) as error:
        raise UserError(f"model is {config.model!r}; expected a config.json that loads ({error})") from None
    return CoarseWorkload(**vars(shape), token_unit=config.token_unit)


def make_prompts(config: SimulateConfig) -> PromptSets:
    """Return prompts of drawn lengths, each made of one token of its own."""
    longest, unit = config.max_prompt_length // config.token_unit, config.token_unit
    draws = (uniform(config.seed, _PROMPT_STREAM, i) for i in range(max(_NUM_PROMPTS, config.batch_size)))
    lengths = [min(longest, drawn_length(u, config.prompt_length, unit=unit)) for u in draws]
    train = [Prompt(text="", token_ids=(i,) * size, row={}) for i, size in enumerate(lengths)]
    return PromptSets(train=train, val=[], num_too_long=0)


class SampleNames:
    """A tokenizer whose text is the number that all tokens of a sample are: see `sample_name`."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        """Return the sample's name."""
        assert skip_special_tokens
        return str(int(token_ids[0]))
