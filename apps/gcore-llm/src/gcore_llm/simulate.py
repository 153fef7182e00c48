"""`gcore-llm simulate`: the program of `train` in simulated time, with the records of a run or with figures alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Literal

import tyro

from gcore_llm.agents.simulated import fit_sessions, play_session
from gcore_llm.config import TrainConfig
from gcore_llm.data.tasks import load_task
from gcore_llm.learning.preparation import sample_flops, workload_of
from gcore_llm.modality import LLMJob, Roles, RunRecorder, SamplingRoles
from gcore_llm.prompts import PromptSets, load_files
from gcore_llm.report import KINDS
from gcore_llm.sections import DataConfig, TrainerConfig
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import EpisodeRole
from gcore_runs import (
    Display,
    RunFolder,
    RunResult,
    UserError,
    build_tokenizer,
    extend_recipes,
    merge,
    model_folder,
    parse,
    run_training,
)
from gcore_runs.settings.parsing import read_toml
from gcore_runs.simulation.cluster import SimulatedCluster, Simulation, StepSummary
from gcore_runs.simulation.command import (
    SIMULATE_TRAIN,
    parse_options,
    run_calibrate,
    run_simulation,
)
from gcore_runs.simulation.config import SimConfig, SimulateConfig
from gcore_runs.simulation.fit import MeasuredRun, measured_run
from gcore_runs.simulation.tokens import (
    Replay,
    SimulatedTokens,
    coarse_prompts,
    coarse_workload,
    decode_sample_name,
    drawn_prompts,
)
from gcore_trainer import ParallelConfig

_PROG = "gcore-llm simulate"
_SETTINGS = {
    "seed": "seed",
    "controllers": "controllers",
    "model": "model",
    "train_batch_size": "data.train_batch_size",
    "max_prompt_length": "data.max_prompt_length",
    "max_response_length": "data.max_response_length",
    "n": "rollout.n",
    "partial_rollout": "rollout.partial_rollout",
    "tail_batching": "rollout.tail_batching",
    "short_response_length": "rollout.short_response_length",
    "over_sample_rate": "rollout.over_sample_rate",
    "filter_groups": "algorithm.filter_groups",
    "max_num_gen_batches": "algorithm.max_num_gen_batches",
    "old_log_probs": "algorithm.old_log_probs",
    "ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "ppo_max_token_len": "actor.ppo_max_token_len",
    "kl_loss_coef": "actor.loss.kl_loss_coef",
}
"""For settings of simulate, those of train."""

_LENGTHS = [_SETTINGS[name] for name in SimulateConfig.lengths]


@dataclass(frozen=True, kw_only=True)
class SimulatedConfig(TrainConfig):
    """The settings of train, and the cluster on which `gcore-llm simulate train` simulates a run of them."""

    is_simulated: ClassVar[bool] = True

    command: Annotated[Literal["simulate"], tyro.conf.Suppress] = "simulate"
    """Which command made the run; for its report."""
    sim: SimConfig = field(default_factory=SimConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sim.check("sim.", self.controllers)


def parse_simulate(args: Sequence[str]) -> SimulateConfig:
    """Parse the command line, whose options override those of a TOML file; see `train_config`."""
    config = parse_options(args, prog=_PROG)
    train_config(config)
    return config


def run_simulate(args: Sequence[str], recipes: Mapping[str, Callable[[], TrainConfig]]) -> None:
    """Run `gcore-llm simulate`; ``recipes`` are those of train."""
    if args[:1] == ["train"]:
        _run_train(args[1:], recipes)
    elif not run_calibrate(args, read_run, prog=_PROG):
        config = parse_simulate(args)
        run_simulation(config, partial(simulate, config))


def _run_train(args: Sequence[str], recipes: Mapping[str, Callable[[], TrainConfig]]) -> None:
    config = parse(
        args,
        prog=f"{_PROG} train",
        recipes=extend_recipes(recipes, SimulatedConfig),
        description=SIMULATE_TRAIN,
    )
    run_training(config, train_simulated, title="simulated")


def simulate(
    config: SimulateConfig,
    stepped: Callable[[StepSummary], None] = lambda _: None,
    *,
    replay: Replay | None = None,
) -> Simulation:
    """Run the program of `train` on modelled services, and call ``stepped`` after every step; see `train_config`.

    A ``replay`` gives the lengths of responses, and the groups whose scores differ, in place of draws.
    """
    return _cluster(train_config(config), replay).simulate(config, stepped)


def train_simulated(config: SimulatedConfig, display: Display | None = None) -> RunResult:
    """Run the program of `train` in simulated time, in a run folder; see `gcore_llm.training.train`."""
    from gcore_llm.training import resolve_inputs

    config = resolve_inputs(config)
    config.sim.check_unit("sim.", {name: attrgetter(name)(config) for name in _LENGTHS})
    schedule = config.trainer.schedule
    image_key = config.data.image_key
    unfit = {
        f"trainer.schedule is {schedule!r}": schedule != "sync",
        "rollout makes several turns": config.rollout.has_several_turns
        and not config.sim.sessions.is_used,
        f"data.image_key is {image_key!r}": bool(image_key),
    }
    expected = (
        "the schedule 'sync', single turns or sim.sessions.turns, and no images in a simulation"
    )
    _refuse(unfit, expected)
    return _cluster(config).train(config, RunRecorder, KINDS, app="gcore-llm", display=display)


def train_config(config: SimulateConfig) -> SimulatedConfig:
    """Return the settings of the program; `UserError` where `TrainConfig` refuses them."""
    sim = SimConfig(**{field.name: getattr(config, field.name) for field in fields(SimConfig)})
    trainer = TrainerConfig(num_processes=config.devices, total_training_steps=config.steps)
    base = SimulatedConfig(
        device="cpu", sim=sim, trainer=trainer, data=DataConfig(shuffle_seed=config.seed)
    )
    values = {path: getattr(config, name) for name, path in _SETTINGS.items()}
    return merge(base, values | {"data.train_batch_size": config.batch_size})


def _cluster(config: SimulatedConfig, replay: Replay | None = None) -> SimulatedCluster[Any, Any]:
    """Return the cluster of a run, whose program has lengths in units of ``token_unit`` tokens."""
    sim = config.sim
    workload = coarse_workload(config.model, sim.token_unit, workload_of)
    values: dict[str, Any] = {
        "device": "cpu",
        "data.num_workers": 0,
        "trainer.num_processes": sim.devices,
        "trainer.backend": "torch",
        "trainer.parallel": asdict(ParallelConfig()),
        # Modelled engines and learners have no policy that could differ.
        "algorithm.max_rollout_kl": 0.0,
    }
    for name in [*_LENGTHS, "algorithm.overlong.buffer_len"]:
        values[name] = attrgetter(name)(config) // sim.token_unit
    coarse_config = merge(config, values, keep=values)
    flops = partial(sample_flops, workload)
    episodes = None
    if sim.sessions.is_used:
        play = partial(play_session, sim, config.seed)
        episodes = EpisodeRole(play=play, on_error="raise")
    return SimulatedCluster(
        job=LLMJob(config=coarse_config, prompts=make_prompts(config), workload=workload),
        sim=sim,
        modality=SimulatedTokens(sim, workload, seed=config.seed, flops=flops, replay=replay),
        n=config.rollout.n,
        roles=Roles,
        services=partial(
            SamplingRoles,
            tokenizer=SimpleNamespace(decode=decode_sample_name),
            episodes=episodes,
        ),
        has_signal=replay and replay.has_signal,
    )


def make_prompts(config: SimulatedConfig) -> PromptSets:
    """Return the prompts of the config's task or files; without any, prompts of drawn lengths. None is held out."""
    data = config.data
    task = config.task
    if not (task.name or data.train_files):
        train = drawn_prompts(
            config.sim, config.seed, data.max_prompt_length, at_least=data.train_batch_size
        )
    else:
        tokenizer = (
            build_tokenizer(model_folder(config.model)) if config.model else tiny_tokenizer()
        )
        load = partial(load_task, task) if task.name else load_files
        train = coarse_prompts(load(data, tokenizer, seed=config.seed).train, config.sim.token_unit)
    return PromptSets(train=train, val=[], num_too_long=0, longest=data.max_prompt_length)


def read_run(path: str, max_steps: int) -> MeasuredRun:
    """Read the last ``max_steps`` steps of a run of `gcore-llm train`; `UserError` where they cannot be simulated."""
    folder = RunFolder.existing(path)
    is_simulated = read_toml(folder.config).get("command") == "simulate"
    config = folder.load_config(SimulatedConfig if is_simulated else TrainConfig)
    estimator = config.algorithm.adv_estimator
    rollout = config.rollout
    epochs = config.actor.ppo_epochs
    unfit = {
        f"algorithm.adv_estimator is {estimator!r}": estimator in ("gae", "remax"),
        f"rollout.partial_rollout is {rollout.partial_rollout}": bool(rollout.partial_rollout),
        "rollout.tail_batching is true": rollout.tail_batching,
        "rollout makes turns of an environment": rollout.multi_turn.is_used,
        f"actor.ppo_epochs is {epochs}": epochs > 1,
    }
    expected = "a run without a critic and greedy responses, of single turns or an agent's that end in their step"
    _refuse(unfit, f"{expected}, and with one epoch", f"{path}: ")
    for model in (folder.export, folder.model, model_folder(config.model)):
        if (model / "config.json").is_file():
            break
    else:
        raise UserError(
            f"{path}: model is {config.model!r}; expected a folder with config.json, or export/ in the run"
        )
    settings = {name: attrgetter(setting)(config) for name, setting in _SETTINGS.items()}
    settings["model"] = str(model.resolve())
    settings["kl_loss_coef"] = config.actor.loss.kl_loss_coef or config.algorithm.kl_ctrl.kl_coef
    num_ranks = config.trainer.num_processes
    return measured_run(
        path,
        folder.metrics,
        settings,
        workload=coarse_workload(settings["model"], 1, workload_of),
        simulate=simulate,
        max_steps=max_steps,
        num_ranks=num_ranks,
        num_replicas=config.trainer.parallel.data_parallel_size(num_ranks),
        num_engines=len(rollout.urls) or max(1, rollout.num_processes),
        engine={
            "max_num_seqs": rollout.planned_num_seqs,
            "prompts": "stealing" if config.runtime == "ray" else "shared",
        },
        reward={"max_concurrency": config.reward_calls.max_concurrency},
        sessions=fit_sessions(folder.path / "sessions") if rollout.agent.run else {},
    )


def _refuse(unfit: Mapping[str, bool], expected: str, where: str = "") -> None:
    for name, is_unfit in unfit.items():
        if is_unfit:
            raise UserError(f"{where}{name}; expected {expected}")
