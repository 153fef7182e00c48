"""The forecast of a run's steps by the planner's laws, from its settings."""

from collections.abc import Callable
from pathlib import Path

from gcore_llm.config import TrainConfig
from gcore_llm.learning.trainer_worker import has_critic, has_reference
from gcore_llm.reward_config import RunJudge
from gcore_placement import Forecast, Job, Lengths, ModelShape
from gcore_runs import model_folder
from gcore_runs.simulation.forecast import forecast_job, model_shape


def run_forecast(config: TrainConfig, model: Path, path: Path) -> Forecast:
    """Return the forecast of a run, on devices of the planner's data sheets, or on CPU cores.

    `gcore-placement plan --correction RUN` uses its corrections. Their file ``path`` is read if it exists, and written
    after each step. `PlacementError` where it is damaged, or the planner does not know the policy in
    the folder ``model``.
    """
    rollout = config.rollout
    num_engines = len(rollout.urls) or max(1, rollout.num_processes)
    job = planner_job(config, model)
    judge = slowest_judge(config)
    num_judges = config.sizes.judges[judge.role] if judge else 0
    return forecast_job(
        config, job, path, num_engines=num_engines, num_judges=num_judges, most_num_seqs=rollout.max_num_seqs
    )


def slowest_judge(config: TrainConfig, shape_of: Callable[[Path], ModelShape] = model_shape) -> RunJudge | None:
    """Return the judge that the others are done before, by the parameters and tokens of each and its engines.

    None: the run starts no judge.
    """
    started = [own for own in config.reward_model.all_judges.values() if own.role in config.judges]

    def work(own: RunJudge) -> float:
        model, counts = shape_of(model_folder(own.path)), config.sizes.judges
        return model.num_parameters * own.settings.max_response_length / counts[own.role]

    # Of one, the model need not be known.
    return max(started, key=work) if len(started) > 1 else next(iter(started), None)


def planner_job(config: TrainConfig, model: Path, shape_of: Callable[[Path], ModelShape] = model_shape) -> Job:
    """Return a run's models and lengths for the planner, with the slowest one of its judges.

    Args:
        model: the policy's folder.
        shape_of: returns the shape of the model in a folder.
    """
    data, judged = config.data, slowest_judge(config, shape_of)
    return Job(
        policy=shape_of(model),
        prompt_lengths=Lengths.recorded([data.max_prompt_length]),
        response_lengths=Lengths.recorded([data.max_response_length]),
        train_batch_size=data.train_batch_size,
        n=config.rollout.n,
        judge=shape_of(model_folder(judged.path)) if judged else None,
        judge_lengths=Lengths.recorded([judged.settings.max_response_length]) if judged else None,
        reference=has_reference(config),
        teachers=[shape_of(model_folder(name)) for name in config.distillation.teachers],
        critic=shape_of(model_folder(config.critic.model or str(model))) if has_critic(config) else None,
        compute_bytes=2 if config.dtype == "bfloat16" else 4,
        old_log_probs=config.algorithm.old_log_probs == "trainer",
        ppo_mini_batch_size=config.actor.ppo_mini_batch_size,
    )
