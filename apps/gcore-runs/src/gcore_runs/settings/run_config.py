"""The settings that runs of several commands share, documented and bounded in their types; apps extend them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, Self, cast

from gcore_controller import RLHFConfig, Sizes
from gcore_placement import STRATEGIES, Strategy
from gcore_runs.errors import UserError
from gcore_runs.settings.checks import Bound, Checked, Count, NonNegative, ReadWith, check_read
from gcore_runs.settings.sections import (
    BaseAlgorithmConfig,
    BaseDataConfig,
    BaseRolloutConfig,
    BaseTrainerConfig,
    LocalCheckpointsConfig,
    LocalEngineConfig,
    PlacementConfig,
    RayConfig,
    RLTrainerConfig,
)

_FOLDER_NAME = Bound(
    lambda name: name and "/" not in name and not name.startswith("."), "a plain folder name"
)


@dataclass(frozen=True, kw_only=True)
class BaseRunConfig(Checked):
    """Settings of every command that makes a run.

    Example:
        >>> config = merge(BaseRunConfig(), {"name": "first", "trainer": {"save_freq": 10}})
        >>> config.trainer.save_freq
        10
        >>> merge(config, {"trainer": {"save_frq": 10}})
        Traceback (most recent call last):
            ...
        gcore_runs.errors.UserError: unknown field trainer.save_frq; did you mean trainer.save_freq?
    """

    may_change: ClassVar[tuple[str, ...]] = (
        "trainer.num_processes",
        "trainer.total_training_steps",
        "trainer.total_epochs",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.max_ckpt_to_keep",
        "trainer.tensorboard",
        "trainer.trackers",
        "trainer.project_name",
        "trainer.prometheus",
        "trainer.heartbeat_timeout_s",
        "resume",
        "threads",
        "device",
    )
    """Settings, and beginnings of their names, that a resumed run may change; * stands for any text."""

    model_settings: ClassVar[tuple[str, ...]] = ("model",)
    """Settings, by dotted name, that are a model's folder or its name on the Hugging Face Hub; * is each of a table."""

    tables: ClassVar[Mapping[str, str]] = {}
    """Settings that are tables of a dataclass's fields, and the attribute with the dataclass that follows from each."""

    read_with: ClassVar[tuple[ReadWith, ...]] = ()
    """Settings that only some values of others read."""

    name: Annotated[str, _FOLDER_NAME] = "default"
    """The run's folder is RUNS_DIR/NAME."""
    runs_dir: str = "runs"
    """Folder of all run folders."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue the run of this name; never: start a new one in NAME-2, NAME-3, ..."""
    model: str = ""
    """The model to train: a folder, or its name on the Hugging Face Hub, NAMESPACE/NAME[@REVISION]; empty: a tiny one
    is made."""
    seed: NonNegative = 0
    """Seed of everything random but the order of the data."""
    threads: NonNegative = 0
    """Threads of matrix products; 0: one a core."""
    device: str = "auto"
    """cpu, cuda, cuda:NUMBER, or auto: cuda where there is one."""
    trainer: BaseTrainerConfig = field(default_factory=BaseTrainerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_read(self)


@dataclass(frozen=True, kw_only=True)
class BaseRLConfig(BaseRunConfig, ABC):
    """Settings of a run of reinforcement learning, whose controllers, engines and ranks may be on a cluster.

    Example:
        >>> class MyConfig(BaseRLConfig):
        ...     judge = ("reward.judge", None)
        >>> config = MyConfig(controllers=2, trainer=RLTrainerConfig(total_epochs=3.0))
        >>> config.over_rows(320).loop.total_steps
        30
    """

    may_change: ClassVar[tuple[str, ...]] = (
        *BaseRunConfig.may_change,
        "runtime",
        "ray",
        "placement",
        "controllers",
        "rollout.num_processes",
        "trainer.early_stopping_patience",
        "trainer.log_samples",
    )

    is_simulated: ClassVar[bool] = False
    """True if the command simulate runs the program, in simulated time and on modelled engines and ranks."""

    runtime: Literal["inline", "ray"] = "inline"
    """inline: all controllers in this process; ray: controllers, engines and training ranks are actors of a Ray
    cluster, and what dies is replaced."""
    controllers: Count = 1
    """SPMD controllers, each with a slice of the prompts, and on ray with engines of its own."""
    data: BaseDataConfig = field(default_factory=BaseDataConfig)
    algorithm: BaseAlgorithmConfig = field(default_factory=BaseAlgorithmConfig)
    trainer: RLTrainerConfig = field(default_factory=RLTrainerConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    local_checkpoints: LocalCheckpointsConfig = field(default_factory=LocalCheckpointsConfig)
    rollout: BaseRolloutConfig = field(default_factory=BaseRolloutConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        may_save = not (self.is_simulated and self.local_checkpoints.folder)
        self.require(
            "local_checkpoints.folder", may_save, "'' in a simulation, which has no models to save"
        )
        self.require(
            "runtime", self.runtime == "inline" or not self.is_simulated, "'inline' in a simulation"
        )
        is_enough = self.runtime != "ray" or not 0 < self.rollout.num_processes < self.controllers
        expected = f"controllers={self.controllers} or more with runtime 'ray', or 0 for one of each controller"
        self.require("rollout.num_processes", is_enough, expected)
        size = self.devices_per_engine
        for role, judge in self.judges.items():
            if self.runtime == "ray" and judge.tensor_parallel_size != size:
                raise UserError(
                    f"{self.judge_section(role)}.tensor_parallel_size is {judge.tensor_parallel_size}; "
                    f"expected {size}, as of rollout, with runtime 'ray'"
                )
        if self.placement.strategy not in (None, "split"):
            self._check_placement()
        if self.lends_ranks:
            self._check_lending()

    @property
    @abstractmethod
    def judge(self) -> tuple[str, LocalEngineConfig | None]:
        """Name of the judge's section, SECTION.judge, and its settings; None: the run starts no judge of its own."""

    @property
    def judges(self) -> Mapping[str, LocalEngineConfig]:
        """All judges that the run starts, by their roles: ``judge``, and ``judge_NAME`` of further ones."""
        _, judge = self.judge
        return {} if judge is None else {"judge": judge}

    def judge_section(self, role: str) -> str:
        """Return the name of a judge's section: that of `judge`, or an entry of the table judges next to it."""
        section, _ = self.judge
        name = role.partition("_")[2]
        return f"{section}s.{name}" if name else section

    def over_rows(self, num_rows: int) -> Self:
        """Return the settings with as many steps as trainer.total-epochs takes, if it is set, with these rows."""
        if not self.trainer.total_epochs:
            return self
        steps = math.ceil(self.trainer.total_epochs * num_rows / self.data.train_batch_size)
        return replace(self, trainer=replace(self.trainer, total_training_steps=steps))

    @property
    def loop(self) -> RLHFConfig:
        """Settings of the RLHF loop."""
        return RLHFConfig(
            total_steps=self.trainer.total_training_steps,
            train_batch_size=self.data.train_batch_size,
            test_freq=self.trainer.test_freq,
            filter_groups=self.algorithm.filter_groups,
            max_num_gen_batches=self.algorithm.max_num_gen_batches,
            curriculum=self.algorithm.curriculum,
            shuffle_seed=self.data.shuffle_seed,
            log_samples=0 if self.is_simulated else self.trainer.log_samples,
        )

    @property
    def rank_unit(self) -> int:
        """Training ranks are started and stopped in multiples of this."""
        return 1

    @property
    def takes_turns(self) -> bool:
        """True if trainer and engines share devices: while one works, the other is asleep."""
        if self.rollout.colocated == "auto":
            return self._is_on_cluster_gpus and self.can_take_turns and not self.lends_ranks
        return self.rollout.colocated

    @property
    def _is_on_cluster_gpus(self) -> bool:
        return self.runtime == "ray" and self.device.startswith("cuda")

    @property
    def lends_ranks(self) -> bool:
        """True if further engines of the policy are on the devices of the ranks, and one of both is asleep."""
        return self.placement.lend_ranks is not False

    @property
    def reads_from_ranks(self) -> bool:
        """True if engines read new weights from the GPUs of the ranks, where NIXL is installed.

        Not where they have GPUs in turns, whose memory the engines need: each rank keeps its part of the weights.
        """
        has_own_gpus = self._is_on_cluster_gpus and not self.takes_turns and not self.lends_ranks
        return has_own_gpus and self.ray.weight_sync == "full"

    @property
    def can_take_turns(self) -> bool:
        """False if settings need trainer and engines at the same time."""
        return True

    @property
    def strategy(self) -> Strategy:
        """The placement strategy that is set, or else the one that suits the devices."""
        engines = self.num_engines
        is_free = self.loop.schedule == "sync" and not self.lends_ranks
        num_judges = sum(judge.num_processes or 1 for judge in self.judges.values())
        can_move = (
            is_free
            and num_judges > 0
            and engines > 0
            and engines + num_judges > 1 + len(self.judges)
        )
        if self.placement.strategy:
            return self.placement.strategy
        return "dynamic" if can_move and self._is_on_cluster_gpus else "split"

    @property
    def engines_sleep(self) -> bool:
        """True if engines are asleep while the trainer, or those of another role, work."""
        shares_ranks = self.takes_turns or self.lends_ranks
        traits = STRATEGIES[self.strategy]
        return shares_ranks or traits.follows_load or traits.is_time_shared

    @property
    def num_engines(self) -> int:
        """Engines of the policy that the run starts on ray; 0: it connects to servers."""
        return self.rollout.num_processes or self.controllers

    @property
    def gpus_per_controller(self) -> float:
        """GPUs that each controller reserves on ray, for reward models that are no engines."""
        return 0.0

    @property
    def devices_per_engine(self) -> int:
        """Devices over which each engine's model is split."""
        return 1

    @property
    def sizes(self) -> Sizes:
        """Processes of each role on ray."""
        in_turns = STRATEGIES[self.strategy].is_time_shared
        engines = self.num_engines
        judges = dict.fromkeys(self.judges, engines)
        if not in_turns:
            judges = {role: judge.num_processes or 1 for role, judge in self.judges.items()}
        return Sizes(
            controllers=self.controllers,
            engines=engines,
            judges=judges,
            ranks=self.trainer.num_processes,
            in_turns=in_turns,
            devices_per_engine=self.devices_per_engine,
            ranks_in_turns=self.takes_turns,
            lends_ranks=self.lends_ranks,
        )

    def with_sizes(self, sizes: Sizes) -> Self:
        """Return these settings with other numbers of processes."""
        sections: dict[str, Any] = {
            "rollout": replace(self.rollout, num_processes=sizes.engines),
            "trainer": replace(self.trainer, num_processes=sizes.ranks),
        }
        for role, number in sizes.judges.items():
            section, _, table = self.judge_section(role).partition(".")
            model = sections.get(section, getattr(self, section))
            sized: Any = replace(cast(Any, self.judges[role]), num_processes=number)
            name = table.partition(".")[2]
            if name:
                sections[section] = replace(model, judges={**model.judges, name: sized})
            else:
                sections[section] = replace(model, judge=sized)
        placement = replace(
            self.placement, strategy="colocated" if sizes.in_turns else self.strategy
        )
        # At once: the settings in between may contradict each other.
        return replace(self, controllers=sizes.controllers, placement=placement, **sections)

    def _check_placement(self) -> None:
        section = self.judge[0]
        for holds, reason in (
            (
                self.runtime == "ray",
                f"runtime {self.runtime!r}; others need runtime 'ray', whose engines share devices",
            ),
            (
                self.judges,
                f"no judge of the run's own in {section}; others divide devices between policy and judge",
            ),
            (self.num_engines > 0, "a policy on servers; others need engines of the run's own"),
        ):
            self.require("placement.strategy", holds, f"'split' with {reason}")
        engines = self.sizes.engines
        in_turns = self.sizes.in_turns
        for role, judge in self.judges.items():
            if in_turns and judge.num_processes not in (0, engines):
                raise UserError(
                    f"{self.judge_section(role)}.num_processes is {judge.num_processes}; expected "
                    f"rollout.num_processes={engines}, or 0 for as many, with placement.strategy 'colocated'"
                )

    def _check_lending(self) -> None:
        strategy = self.placement.strategy
        schedule = self.loop.schedule
        has_engines = self.num_engines > 0 and (
            self.runtime == "ray" or self.rollout.num_processes > 0
        )
        for unfit, why in (
            (self.is_simulated, "a simulation, whose roles have devices of their own"),
            (
                schedule != "sync",
                f"trainer.schedule {schedule!r}, whose ranks train while the policy samples",
            ),
            (
                self.rollout.colocated is True,
                "rollout.colocated true, where all engines share the devices of ranks",
            ),
            (
                strategy not in (None, "split"),
                f"placement.strategy {strategy!r}; 'split' or None take it",
            ),
            (
                not has_engines,
                "rollout.num_processes 0 or servers; 1 or more engines have devices of their own",
            ),
            (not self.sizes.num_lent, "trainer.num_processes below rollout.tensor_parallel_size"),
        ):
            self.require("placement.lend_ranks", not unfit, f"false with {why}")
