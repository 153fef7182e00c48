"""Engines of the policy and of a judge: their settings, and what is recorded and checked of them in a run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

# By attribute: settings are read without importing engines.
import gcore_rollout
from gcore_controller import LENT
from gcore_rollout import (
    EngineKind,
    JudgeModel,
    Reduce,
    RequestError,
    SamplingParams,
    ScorePattern,
    check_engine_options,
    engine_kind,
    engine_names,
)
from gcore_runs import Bound, Checked, Count, NonNegative, UserError, at_least, logged

if TYPE_CHECKING:
    from gcore_controller import DeviceTimers, Lending
    from gcore_rollout import Engine, RequestT, SampleT, WeightRecord
    from gcore_runs.settings.run_config import BaseRLConfig, BaseRunConfig

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SLEEP_MODE = "enable_sleep_mode"
_TENSOR_PARALLEL = "tensor_parallel_size"
_SERVER_PYTHON = "server_python"
DRAFT_MODEL = "rollout.engine_options.speculative_config.model"
"""The setting of a draft model."""


@dataclass(frozen=True, kw_only=True)
class LocalEngineConfig(Checked):
    """An engine in this process, or replicas of it in processes of their own."""

    engine: str = "hf"
    """hf: transformers; vllm: vLLM; sglang: an SGLang server that the run starts, in an environment of its own
    (server_python); vllm_server and sglang_server: servers of these at urls, which are running already.
    PATH.py:function: an engine of your own (gcore_rollout.Engine), made by a function of the model's folder and the
    keywords device, dtype, max_num_seqs and eos_token_ids."""
    num_processes: NonNegative = 0
    """Replicas of an engine that is not on servers, each a process of its own that is replaced if it dies; 0: one, in
    the main process. All processes that generate share the threads, and each has a GPU of its own as long as there are
    any."""
    tensor_parallel_size: Count = 1
    """Devices of each replica in vllm or sglang, over which the model is split; of one machine, and with vllm on CPU a
    process each."""
    server_python: str = ""
    """Python of an environment with SGLang, such as ~/sglang/bin/python, on every machine with an engine; for
    sglang."""
    engine_options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further keyword arguments of the engine: of vllm, fields of its EngineArgs, such as quantization = "fp8",
    kv_cache_dtype or speculative_config, and seed_per_sample; of sglang, of its ServerArgs; of hf, decode_mode
    (dynamic, static, cuda_graphs) and kv_cache_bytes; of your own engine, any. On the command line NAME=VALUE, several
    of them, or JSON."""

    @property
    def kind(self) -> EngineKind:
        return engine_kind(self.engine)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            engine_kind(self.engine)
        except RequestError as error:
            raise UserError(f"{self.section}.{error}") from None
        is_taken = self.tensor_parallel_size == 1 or _TENSOR_PARALLEL in self.kind.own_options
        more = "vllm and sglang take more"
        self.require(
            "tensor_parallel_size",
            is_taken,
            f"1 with {self.section}.engine {self.engine!r}; {more}",
        )
        try:
            check_engine_options(self.engine, self.engine_options, server_python=self.server_python)
        except RequestError as error:
            raise UserError(f"{self.section}.{error}") from None
        name = _SERVER_PYTHON
        engine = f"with {self.section}.engine {self.engine!r}"
        starts_server = name in self.kind.own_options
        expected = (
            "the Python of an environment with SGLang"
            if starts_server
            else "'', as sglang alone takes it,"
        )
        self.require(name, starts_server == bool(self.server_python), f"{expected} {engine}")

    @property
    def draft_model(self) -> str:
        """Folder or name of the model that guesses in speculative decoding; empty: none does."""
        speculation = self.engine_options.get("speculative_config")
        if not isinstance(speculation, Mapping):
            return ""
        return str(speculation.get("model", ""))

    def check_server_python(self) -> None:
        """Raise `UserError` if there is no such file on this machine."""
        python = Path(self.server_python).expanduser()
        if self.server_python and not (python.is_file() and os.access(python, os.X_OK)):
            raise UserError(
                f"{self.section}.server_python is {self.server_python!r}; expected the Python of an environment with "
                "SGLang"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig(LocalEngineConfig):
    """The engine of a model, here or on servers."""

    urls: tuple[str, ...] = ()
    """Servers, such as http://10.0.0.7:8000, each a replica, and used by this run alone while it lasts."""

    @property
    def is_on_servers(self) -> bool:
        return self.kind.is_server

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.section
        if self.is_on_servers != bool(self.urls):
            servers = " or ".join(engine_names(lambda engine: engine.is_server))
            raise UserError(
                f"{prefix}.engine is {self.engine!r} and {prefix}.urls is {list(self.urls)}; expected {servers} with "
                "one or more urls, or another engine without"
            )
        if len(set(self.urls)) < len(self.urls):
            raise UserError(f"{prefix}.urls is {list(self.urls)}; expected each server once")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(
                    f"{prefix}.urls has {url!r}; expected http://HOST:PORT or https://HOST:PORT"
                )
        if self.is_on_servers and self.num_processes:
            raise UserError(
                f"{prefix}.num_processes is {self.num_processes} and {prefix}.engine is {self.engine!r}; expected 0, "
                f"because the replicas are the servers at {prefix}.urls"
            )


@dataclass(frozen=True, kw_only=True)
class PolicyEngineConfig(EngineConfig):
    """The engine of the policy, and what can be set of some kinds of engines alone."""

    colocated: bool | Literal["auto"] = "auto"
    """true: the trainer leaves the memory of its devices while the engines, and a judge of this run's own, generate,
    and these while the trainer works; on ray each training rank is then on the device of an engine. false: all stay in
    memory, on ray on devices of their own. auto: true on a cluster with GPUs, with schedule sync;
    and where trainer and engine share a GPU of this machine that cannot hold both, by the plan of its memory that is
    shown at the start."""
    gpu_memory_utilization: Annotated[
        float | None,
        Bound(lambda share: share is None or 0 < share <= 1, "a number in (0, 1], or None"),
    ] = None
    """Share of the GPU's memory that an engine takes for weights, keys and values, in vllm and sglang; unset: as much
    as is left next to a trainer on the same GPU, or what they choose."""
    max_num_batched_tokens: Annotated[
        int | None, Bound(lambda tokens: tokens is None or tokens >= 1, "1 or more, or None")
    ] = None
    """Most tokens that vllm computes in a step; unset: 16384 on a GPU with 70 GiB or more, 8192 on others, and 2048 on
    CPU."""

    @property
    def memory_options(self) -> dict[str, Any]:
        """The settings above that are set."""
        options: dict[str, Any] = {}
        for name in ("gpu_memory_utilization", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        return options

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.memory_options:
            takers = " or ".join(engine_names(lambda engine, name=name: name in engine.own_options))
            is_taken = name in self.kind.own_options
            self.require(
                name,
                is_taken,
                f"None with {self.section}.engine {self.engine!r}; {takers} takes it",
            )


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(LocalEngineConfig):
    """A generative reward model: its engine, the questions to it, and the reading of its verdicts."""

    template: str = ""
    """File with the question, with fields in braces; empty: how good it is, from 0 to 10."""
    n: Annotated[int, at_least(1, "at least 1")] = 1
    """Verdicts on each question."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: Annotated[float, at_least(0, "at least 0")] = 1.0
    """Temperature of its sampling; 0: greedy."""
    max_response_length: Annotated[int, at_least(1, "at least 1")] = 512
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score; its last match in a verdict counts. Empty: "Score: 7"."""
    low: float = 0.0
    """The score that is scaled to 0."""
    high: float = 10.0
    """The score that is scaled to 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_enough = self.num_processes or not self.kind.needs_own_process
        self.require(
            "num_processes", is_enough, f"1 or more with {self.section}.engine {self.engine!r}"
        )

    def question(self) -> str:
        """Read the file of the question; empty: there is none. `UserError` if it cannot be read."""
        if not self.template:
            return ""
        try:
            return Path(self.template).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.section}.template is {self.template!r}: {error}") from None

    def model(self, **fields: Any) -> JudgeModel:
        """Return the model that is asked so; ``fields`` are the others of `JudgeModel`."""
        sampling = SamplingParams(max_tokens=self.max_response_length, temperature=self.temperature)
        return JudgeModel(sampling=sampling, n=self.n, **fields)

    def scores(self) -> ScorePattern:
        """Return what reads the score of a verdict; `UserError` if the scores to scale are one."""
        if self.low == self.high:
            raise UserError(f"{self.section}.low and high are both {self.low}; expected two scores")
        return ScorePattern(
            pattern=self.pattern or ScorePattern.pattern, low=self.low, high=self.high
        )


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

        def make_factory(index: int) -> "Callable[[], Engine[RequestT, SampleT]]":
            if not self.logs:
                return make
            return partial(logged, self.logs, *names[index], make)

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


def device_timers(config: "BaseRLConfig") -> "DeviceTimers":
    """Return the timers of this machine's devices, each of which engines, judges and ranks share where they take turns.

    Engines are on the devices of the ranks, from the first, and judges on those after the engines'.
    """
    from gcore_controller import DeviceTimers

    if config.lends_ranks:
        count = config.sizes.num_lent
        size = config.devices_per_engine
        shared = {f"{LENT} {i}": f"device {i}" for i in range(count)}
        shared |= {f"trainer {rank}": f"device {rank // size}" for rank in range(count * size)}
        return DeviceTimers(shared=shared)
    if not config.takes_turns:
        return DeviceTimers()
    engines = config.rollout.num_processes
    size = config.devices_per_engine
    num_gpus = len(gcore_rollout.visible_gpus(config.device))
    first = engines * size
    devices = {f"engine {i}": i * size for i in range(engines or 1)}
    for rank in range(config.sizes.ranks):
        # The row of an engine on several devices is that of the ranks there, too.
        devices[f"trainer {rank}"] = rank // size * size if rank < engines * size else rank
    for role, judge in config.judges.items():
        # One without a process is in this one, on the first device.
        devices |= {f"{role} {i}": first + i for i in range(judge.num_processes)} or {
            f"{role} 0": 0
        }
        first += judge.num_processes
    if num_gpus:
        devices = {name: index % num_gpus for name, index in devices.items()}
    return DeviceTimers(shared={name: f"device {index}" for name, index in devices.items()})


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
    less. A user's own settings stay; and vLLM's sleep mode refuses such segments, wherever it may be used.
    """
    is_set = any(os.environ.get(name) for name in _ALLOCATOR_VARIABLES)
    if is_set or _vllm_may_sleep(config) or not config.device.startswith("cuda"):
        return {}
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def device_options(settings: LocalEngineConfig, config: "BaseRLConfig") -> dict[str, Any]:
    """Return the options with which an engine is started on several devices, by a server, and one that is to sleep."""
    accepted = settings.kind.own_options
    options: dict[str, Any] = {}
    if config.engines_sleep and _SLEEP_MODE in accepted:
        options[_SLEEP_MODE] = True
    if _SERVER_PYTHON in accepted:
        options[_SERVER_PYTHON] = settings.server_python
    if settings.tensor_parallel_size > 1:
        options[_TENSOR_PARALLEL] = settings.tensor_parallel_size
    return options


def _vllm_may_sleep(config: "BaseRunConfig") -> bool:
    """Return whether an engine of the policy or a judge may be started with vLLM's sleep mode."""
    from gcore_runs.settings.run_config import BaseRLConfig

    # Whether an automatic choice on one GPU is to take turns is known later.
    if not isinstance(config, BaseRLConfig) or not (
        config.engines_sleep or config.rollout.colocated
    ):
        return False
    engines: list[Any] = [config.rollout, *config.judges.values()]
    return any(
        _SLEEP_MODE in e.kind.own_options for e in engines if isinstance(e, LocalEngineConfig)
    )
