"""Engines of the policy and of a judge: what is recorded and checked of them in a run."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

# By attribute: settings are read without importing engines.
import gcore_rollout
from gcore_controller import LENT
from gcore_runs.logs import logged
from gcore_runs.settings.sections import LocalEngineConfig

if TYPE_CHECKING:
    from gcore_controller import DeviceTimers, Lending
    from gcore_rollout import Engine, RequestT, SampleT, WeightRecord
    from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SLEEP_MODE = "enable_sleep_mode"
_TENSOR_PARALLEL = "tensor_parallel_size"
DRAFT_MODEL = "rollout.engine_options.speculative_config.model"
"""The setting of a draft model."""


def stage_of(role: str) -> str:
    """Return the stage in which engines of a role work: gen, reward, or that of a further judge, reward/NAME."""
    if role == "engine":
        return "gen"
    name = role.partition("_")[2]
    return f"reward/{name}" if name else "reward"


@dataclass(frozen=True, kw_only=True)
class Instrumentation:
    """Instrumentation of the replicas of a model. Each is named by its role and its number."""

    role: str = "engine"
    """The role of the replicas: that of the policy, or a judge's, ``judge``, or ``judge_`` and its name."""
    devices: "DeviceTimers | None" = None
    """Record when the replicas work."""
    logs: Path | None = None
    """Folder of the log files of replicas that are processes of their own."""
    record: "WeightRecord" = field(default_factory=lambda: gcore_rollout.WeightRecord())
    """The weights that the replicas of a policy should have."""
    announce: Callable[[str], None] | None = None
    """Called with a line when a replica has died; see `EngineReplicas`."""

    def instrument(
        self, engine: "Engine[RequestT, SampleT]", name: int | str
    ) -> "Engine[RequestT, SampleT]":
        """Wrap the replica of this number or, if another role lends it, of this name."""
        if not isinstance(name, str):
            name = f"{self.role} {name}"
        return gcore_rollout.InstrumentedEngine(
            engine,
            name=name,
            timers=self.devices,
            stage=stage_of(self.role),
            record=self.record if self.role == "engine" else None,
        )

    async def start(
        self,
        make: "Callable[[], Engine[RequestT, SampleT]]",
        count: int,
        *,
        num_threads: int,
        preload: tuple[str, ...],
        gpus: Sequence[str] = (),
        num_lent: int = 0,
    ) -> "Engine[RequestT, SampleT]":
        """Start ``count`` replicas in processes of their own, which log to files; 0: one, in this process.

        ``num_lent`` more are on the devices of training ranks; see `start_replicas` for the other arguments.
        """
        if not count:
            return self.instrument(make(), 0)
        names = [(self.role, i) for i in range(count)] + [(LENT, i) for i in range(num_lent)]

        make_engine = partial(make_next_to_gpus, make) if gpus else make

        def make_factory(index: int) -> "Callable[[], Engine[RequestT, SampleT]]":
            if not self.logs:
                return make_engine
            return partial(logged, self.logs, *names[index], make_engine)

        def wrap(engine: "Engine[RequestT, SampleT]", index: int) -> "Engine[RequestT, SampleT]":
            role, number = names[index]
            return self.instrument(engine, f"{role} {number}")

        return await gcore_rollout.start_replicas(
            make_factory,
            len(names),
            num_threads=num_threads,
            preload=preload,
            gpus=gpus,
            wrap=wrap,
            announce=self.announce,
            num_lent=num_lent,
        )


NO_INSTRUMENTATION = Instrumentation()


def make_next_to_gpus(
    make: "Callable[[], Engine[RequestT, SampleT]]",
) -> "Engine[RequestT, SampleT]":
    """Make an engine in a process that runs on the CPUs next to its GPUs from now on."""
    from gcore_runs.loop.cpu_binding import bind_to_gpus

    bind_to_gpus()
    return make()


def device_timers(config: "BaseRLConfig") -> "DeviceTimers":
    """Return the timers of this machine's devices, each of which engines, judges and ranks share where they take turns.

    Engines are on the devices of the ranks, from the first, and judges on those after the engines'.
    """
    from gcore_controller import DeviceTimers

    size = config.devices_per_engine
    shared: dict[str, str] = {}
    if config.lends_ranks:
        for index in range(config.sizes.num_lent):
            shared[f"{LENT} {index}"] = f"device {index}"
            for rank in range(index * size, (index + 1) * size):
                shared[f"trainer {rank}"] = f"device {index}"
        return DeviceTimers(shared=shared)
    if not config.takes_turns:
        return DeviceTimers()
    engines = config.rollout.num_processes
    first = engines * size
    devices: dict[str, int] = {}
    for number in range(engines or 1):
        devices[f"engine {number}"] = number * size
    for rank in range(config.sizes.ranks):
        # The row of an engine on several devices is that of the ranks there, too.
        devices[f"trainer {rank}"] = rank // size * size if rank < engines * size else rank
    for role, judge in config.judges.items():
        # One without a process is in this one, on the first device.
        if not judge.num_processes:
            devices[f"{role} 0"] = 0
        for number in range(judge.num_processes):
            devices[f"{role} {number}"] = first + number
        first += judge.num_processes
    num_gpus = len(gcore_rollout.visible_gpus(config.device))
    for name, index in devices.items():
        if num_gpus:
            index %= num_gpus
        shared[name] = f"device {index}"
    return DeviceTimers(shared=shared)


def engines_in_turns(
    config: "BaseRLConfig", policy: "Engine[Any, Any]", judges: "Sequence[Engine[Any, Any]]"
) -> "list[Engine[Any, Any]]":
    """Return the engines that take turns with the training ranks, the policy's first; none if all have their devices.

    Where ranks are lent, it is the policy's alone, of which the lent ones sleep and wake.
    """
    if config.lends_ranks:
        return [policy]
    return [policy, *judges] if config.takes_turns else []


def lending_of(config: "BaseRLConfig") -> "Lending | None":
    """Return how ranks lend their devices; None: they do not."""
    if not config.lends_ranks:
        return None
    from gcore_controller import Lending
    from gcore_placement import LendChoice

    count = config.sizes.num_lent
    if config.placement.lend_ranks != "auto":
        return Lending(num_engines=count)
    choice = LendChoice(engines=config.sizes.engines, lent=count)
    return Lending(num_engines=count, choose=choice.observe)


def allocator_variables(config: "BaseRunConfig") -> dict[str, str]:
    """Return the environment's variables that set up torch's CUDA allocator in a run's processes.

    Rows differ in length, and blocks of fixed sizes would leave memory between them unused: segments that grow leave
    less. A user's own settings stay. vLLM has plain segments for what sleeps, whatever these settings are.
    """
    is_set = any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES)
    if is_set or not config.device.startswith("cuda"):
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def device_options(settings: LocalEngineConfig, config: "BaseRLConfig") -> dict[str, Any]:
    """Return the options with which an engine is started on several devices, and one that is to sleep."""
    accepted = settings.kind.own_options
    options: dict[str, Any] = {}
    if config.engines_sleep and _SLEEP_MODE in accepted:
        options[_SLEEP_MODE] = True
    if settings.tensor_parallel_size > 1:
        options[_TENSOR_PARALLEL] = settings.tensor_parallel_size
    return options


def list_preloads(config: "BaseRLConfig") -> tuple[str, ...]:
    """Return the modules that processes of the policy's engines and the judges' need."""
    modules: dict[str, None] = {}
    for engine in (config.rollout, *config.judges.values()):
        if isinstance(engine, LocalEngineConfig):
            modules.update(dict.fromkeys(engine.kind.preload))
    return tuple(modules)
