"""The forecast of a run's steps by the planner's laws, from its settings."""

from collections.abc import Callable, Mapping
from pathlib import Path

from gcore_llm.config import TrainConfig
from gcore_llm.learning.trainer_worker import has_critic, has_reference
from gcore_llm.sections import RunJudge
from gcore_placement import EngineLayout, Job, Lengths, ModelShape, TrainingLayout
from gcore_runs import model_folder
from gcore_runs.simulation.forecast import forecast_job, model_shape
from gcore_trainer import LARGE_MODEL


def run_forecast(
    config: TrainConfig, model: Path, path: Path
) -> Callable[[Mapping[str, float]], dict[str, float]]:
    """Return what forecasts a run's step by its metrics, on devices of the planner's data sheets, or on CPU cores.

    `gcore-placement plan --correction RUN` uses its corrections. Their file ``path`` is read if it exists, and written
    after each step. `PlacementError` where it is damaged, or the planner does not know the policy in
    the folder ``model``.
    """
    rollout = config.rollout
    num_engines = len(rollout.urls) or max(1, rollout.num_processes)
    if config.placement.lend_ranks is True:
        num_engines += config.sizes.num_lent
    job = planner_job(config, model)
    judge = slowest_judge(config)
    judges = None
    if judge is not None:
        judges = EngineLayout(
            num_engines=config.sizes.judges[judge.role],
            devices_per_engine=judge.settings.tensor_parallel_size,
            max_num_seqs=rollout.planned_num_seqs,
        )
    engines = EngineLayout(
        num_engines=num_engines,
        devices_per_engine=rollout.tensor_parallel_size,
        max_num_seqs=rollout.planned_num_seqs,
    )
    return forecast_job(
        config, job, path, training_layout(config, job.policy), engines=engines, judges=judges
    )


def slowest_judge(
    config: TrainConfig, shape_of: Callable[[Path], ModelShape] = model_shape
) -> RunJudge | None:
    """Return the judge that the others are done before, by the parameters and tokens of each and its engines.

    None: the run starts no judge.
    """
    judges = [
        judge for judge in config.reward_model.all_judges.values() if judge.role in config.judges
    ]

    def work(judge: RunJudge) -> float:
        model = shape_of(model_folder(judge.path))
        return (
            model.num_parameters
            * judge.settings.max_response_length
            / config.sizes.judges[judge.role]
        )

    if len(judges) > 1:
        return max(judges, key=work)
    # Of one, the model need not be known.
    return next(iter(judges), None)


def planner_job(
    config: TrainConfig, model: Path, shape_of: Callable[[Path], ModelShape] = model_shape
) -> Job:
    """Return a run's models and lengths for the planner, with the slowest one of its judges.

    Args:
        model: the policy's folder.
        shape_of: returns the shape of the model in a folder.
    """
    data = config.data
    policy = shape_of(model)
    judge_shape: ModelShape | None = None
    judge_lengths: Lengths | None = None
    judge = slowest_judge(config, shape_of)
    if judge is not None:
        judge_shape = shape_of(model_folder(judge.path))
        judge_lengths = Lengths.recorded([judge.settings.max_response_length])
    critic: ModelShape | None = None
    if has_critic(config):
        critic = shape_of(model_folder(config.critic.model or str(model)))
    return Job(
        policy=policy,
        prompt_lengths=Lengths.recorded([data.max_prompt_length]),
        response_lengths=Lengths.recorded([data.max_response_length]),
        train_batch_size=data.train_batch_size,
        n=config.rollout.n,
        judge=judge_shape,
        judge_lengths=judge_lengths,
        reference=has_reference(config),
        teachers=[shape_of(model_folder(name)) for name in config.distillation.teachers],
        critic=critic,
        compute_bytes=2 if config.dtype == "bfloat16" else 4,
        old_log_probs=config.algorithm.old_log_probs == "trainer",
        ppo_mini_batch_size=config.actor.ppo_mini_batch_size,
    )


def training_layout(config: TrainConfig, policy: ModelShape) -> TrainingLayout:
    """Return the layout of a run's training ranks, of a policy of this shape."""
    trainer = config.trainer
    parallel = trainer.parallel
    is_megatron = trainer.backend == "megatron"
    is_checkpointed = config.actor.has_checkpointing
    granularity = trainer.megatron_config.recompute_granularity
    if is_megatron and granularity != "auto":
        is_checkpointed = granularity == "full"
    elif is_checkpointed == "auto":
        is_checkpointed = policy.num_parameters >= LARGE_MODEL
    return TrainingLayout(
        backend=trainer.backend,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size if is_megatron else 1,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size if is_megatron else 1,
        context_parallel_size=parallel.context_parallel_size,
        data_parallel_size=parallel.data_parallel_size(trainer.num_processes),
        gradient_checkpointing=is_checkpointed,
        ppo_max_token_len=config.actor.ppo_max_token_len,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
    )
