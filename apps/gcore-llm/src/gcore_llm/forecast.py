"""The forecast of a run's steps by the planner's laws, from its settings."""

from collections.abc import Callable, Mapping
from pathlib import Path

from gcore_llm.config import TrainConfig
from gcore_llm.learning.trainer_worker import has_critic, has_reference
from gcore_llm.sections import RunJudge
from gcore_placement import Job, Lengths, ModelShape
from gcore_runs import model_folder
from gcore_runs.simulation.forecast import forecast_job, model_shape


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
    job = planner_job(config, model)
    judge = slowest_judge(config)
    num_judges = 0
    if judge is not None:
        num_judges = config.sizes.judges[judge.role]
    return forecast_job(
        config,
        job,
        path,
        num_engines=num_engines,
        num_judges=num_judges,
        most_num_seqs=rollout.planned_num_seqs,
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
