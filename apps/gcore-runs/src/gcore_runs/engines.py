"""Engines of the policy and of a judge: their settings, and what is recorded and checked of them in a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

# By attribute: settings are read without importing engines.
import gcore_rollout
from gcore_rollout import EngineKind, RequestError, engine_kind, engine_names
from gcore_runs import Checked, Count, NonNegative, UserError, logged

if TYPE_CHECKING:
    from gcore_controller import DeviceTimers
    from gcore_rollout import Engine, RequestT, SampleT, WeightRecord


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Checked):
    """The engine of a model."""

    engine: str = "hf"
    """hf: transformers; vllm: vLLM; vllm_server and sglang_server: servers of these at urls, which are running already.
    PATH.py:function: an engine of your own (gcore_rollout.Engine), made by a function of the model's folder and the
    keywords device, dtype, max_num_seqs and eos_token_ids."""
    num_processes: NonNegative = 0
    """Replicas of an engine that is not on servers, each a process of its own that is replaced if it dies; 0: one, in
    the main process. All processes that generate share the threads, and each has a GPU of its own as long as there are
    any."""
    urls: tuple[str, ...] = ()
    """Servers, such as http://10.0.0.7:8000, each a replica, and used by this run alone while it lasts."""

    @property
    def kind(self) -> EngineKind:
        return engine_kind(self.engine)

    @property
    def is_on_servers(self) -> bool:
        return self.kind.is_server

    @property
    def takes_images(self) -> bool:
        return self.kind.takes_images

    @property
    def takes_speculation(self) -> bool:
        return self.kind.takes_speculative_config

    def __post_init__(self) -> None:
        super().__post_init__()
        prefix = self.section
        try:
            is_on_servers = self.is_on_servers
        except RequestError as error:
            raise UserError(f"{prefix}.{error}") from None
        if is_on_servers != bool(self.urls):
            servers = " or ".join(engine_names(lambda kind: kind.is_server))
            raise UserError(
                f"{prefix}.engine is {self.engine!r} and {prefix}.urls is {list(self.urls)}; expected {servers} with "
                "one or more urls, or another engine without"
            )
        if len(set(self.urls)) < len(self.urls):
            raise UserError(f"{prefix}.urls is {list(self.urls)}; expected each server once")
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                raise UserError(f"{prefix}.urls has {url!r}; expected http://HOST:PORT or https://HOST:PORT")
        if is_on_servers and self.num_processes:
            raise UserError(
                f"{prefix}.num_processes is {self.num_processes} and {prefix}.engine is {self.engine!r}; expected 0, "
                f"because the replicas are the servers at {prefix}.urls"
            )


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig(Checked, section="rollout.speculative"):
    """Speculative decoding in vllm: tokens are guessed and verified together; the samples' distribution stays."""

    num_speculative_tokens: NonNegative = 0
    """Tokens guessed at a time; 0: none."""
    model: str = ""
    """Hugging Face folder of a smaller model with the same tokens, which guesses; empty: guess what followed the last
    occurrence of the same tokens (ngram)."""
    prompt_lookup_max: int = 4
    """Largest number of tokens that such an occurrence must share."""
    prompt_lookup_min: Count = 2
    """Smallest number of tokens that such an occurrence must share."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if most < least:
            raise UserError(f"rollout.speculative.prompt_lookup_max is {most}; expected {least} or more")
        if self.model and not self.num_speculative_tokens:
            raise UserError(
                "rollout.speculative.num_speculative_tokens is 0; expected 1 or more with "
                f"rollout.speculative.model {self.model!r}"
            )

    def as_vllm_takes_it(self) -> dict[str, object] | None:
        """Return the setting as vLLM takes it; None: no speculation."""
        if not self.num_speculative_tokens:
            return None
        guess: dict[str, object] = {"num_speculative_tokens": self.num_speculative_tokens}
        if self.model:
            return guess | {"method": "draft_model", "model": self.model}
        bounds = {"prompt_lookup_max": self.prompt_lookup_max, "prompt_lookup_min": self.prompt_lookup_min}
        return guess | {"method": "ngram"} | bounds


@dataclass(frozen=True, kw_only=True)
class Instrumentation:
    """Instrumentation of the replicas of a model. Each is named by its role and its number."""

    role: Literal["engine", "judge"] = "engine"
    devices: "DeviceTimers | None" = None
    """Record when the replicas work."""
    logs: Path | None = None
    """Folder of the log files of replicas that are processes of their own."""
    device: Literal["engine", "judge"] | None = None
    """The role whose devices the replicas share; None: they have devices of their own."""
    record: "WeightRecord" = field(default_factory=lambda: gcore_rollout.WeightRecord())
    """The weights that the replicas of a policy should have."""
    announce: Callable[[str], None] | None = None
    """Called with a line when a replica has died; see `EngineReplicas`."""

    def instrument(self, engine: "Engine[RequestT, SampleT]", number: int) -> "Engine[RequestT, SampleT]":
        """Wrap the replica of this number."""
        name, stage = f"{self.role} {number}", "gen" if self.role == "engine" else "reward"
        if self.role == "engine":
            engine = gcore_rollout.CheckedEngine(engine, name=name, record=self.record)
        if self.devices is None:
            return engine
        device = f"{self.device or self.role} {number}"
        return gcore_rollout.TimedEngine(engine, self.devices, device=device, stage=stage, name=name)

    async def start(
        self,
        make: "Callable[[], Engine[RequestT, SampleT]]",
        count: int,
        *,
        num_threads: int,
        preload: tuple[str, ...],
        gpus: Sequence[str] = (),
    ) -> "Engine[RequestT, SampleT]":
        """Start ``count`` replicas in processes of their own, which log to files; 0: one, in this process.

        See `start_replicas` for the other arguments.
        """
        if not count:
            return self.instrument(make(), 0)
        return await gcore_rollout.start_replicas(
            lambda place: partial(logged, self.logs, self.role, place, make) if self.logs else make,
            count,
            num_threads=num_threads,
            preload=preload,
            gpus=gpus,
            wrap=self.instrument,
            announce=self.announce,
        )


NO_INSTRUMENTATION = Instrumentation()
