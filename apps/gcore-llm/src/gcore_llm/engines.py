"""Engines of a policy or a judge: in this process, in processes of their own, or on servers."""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore_ckpt import load
from gcore_llm.config import TrainConfig
from gcore_llm.engine_config import EngineConfig
from gcore_llm.model_limits import longest_sequence
from gcore_llm.rollout_config import RolloutConfig
from gcore_rollout import Engine
from gcore_rollout.errors import EngineDiedError
from gcore_rollout.rewards import load_function
from gcore_runs.errors import UserError
from gcore_runs.instrumented_engine import NO_INSTRUMENTATION, Instrumentation

# Of a model's config.json, what does not change what it computes.
_NOTES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


async def start_policy(
    config: TrainConfig,
    model: Path,
    *,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation = NO_INSTRUMENTATION,
) -> Engine:
    """The policy's engine, with the weights of a model folder.

    Raises:
        RolloutError: it does not start, or a server cannot take the weights.
    """
    rollout = config.rollout
    start = partial(_start, rollout, config, model, instrumentation, eos_token_ids=eos_token_ids)
    engine = await start(weights_dir=rollout.weights_dir or None)
    if not rollout.is_on_servers:
        return engine
    # They may have the last weights of another run. To a new engine, what they have is version 0.
    try:
        await engine.update_weights(load(model).items(), version=1)
    finally:
        await engine.close()
    return await start(weights_dir=rollout.weights_dir)


async def start_judge(
    config: TrainConfig,
    model: Path,
    *,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation = NO_INSTRUMENTATION,
) -> Engine:
    """A judge's engine.

    Raises:
        RolloutError: it does not start.
    """
    instrumentation = replace(instrumentation, role="judge")
    return await _start(config.reward_model.judge, config, model, instrumentation, eos_token_ids=eos_token_ids)


def check_engine(settings: EngineConfig, model: Path, *, setting: str, max_length: int | None = None) -> None:
    """Import an engine of the user's own, or ask every server what it runs, as far as it tells.

    Args:
        model: folder of the model that it should run.
        setting: where the settings are, for errors.
        max_length: longest prompt and response together, in tokens.

    Raises:
        RewardError: there is no such function.
        UserError: a server does not answer, or runs another model, one that takes fewer tokens, or one whose rotary
            embeddings (rope_type ``longrope``) it computes for another length than the trainer does.
    """
    if settings.is_own:
        load_function(settings.engine, setting=f"{setting}.engine")
    if not settings.is_on_servers:
        return
    from gcore_rollout.servers.client import ServerClient

    for url in settings.urls:
        try:
            served = ServerClient(url, timeout_s=30.0).call_blocking("GET", "/v1/models")["data"][0]
        except EngineDiedError as error:
            raise UserError(f"no {settings.engine} answers at {url}: {error}") from error
        root = Path(served.get("root") or "")
        theirs = root / "config.json"
        if theirs.is_file() and _settings(theirs) != _settings(model / "config.json"):
            raise UserError(f"the server at {url} runs {root}: another model than {model}")
        served_length = served.get("max_model_len")
        if served_length is not None and max_length is not None and served_length < max_length:
            raise UserError(
                f"the server at {url} takes {served_length} tokens: data.max_prompt_length + "
                f"data.max_response_length = {max_length} are needed"
            )
        if max_length is not None:
            _check_longrope(settings, url, model, served_length, max_length)


def _check_longrope(settings: EngineConfig, url: str, model: Path, served_length: int | None, max_length: int) -> None:
    """Refuse a server that chooses other factors of ``longrope`` than the trainer, which chooses them by max_length."""
    from transformers import AutoConfig

    rope: Any = getattr(AutoConfig.from_pretrained(model).get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    if settings.engine == "sglang_server":
        raise UserError(
            "rollout.engine is 'sglang_server'; expected hf, vllm or vllm_server for rope_type 'longrope': SGLang "
            "chooses its factors by the longest sequence of each batch"
        )
    original: int = rope["original_max_position_embeddings"]
    if served_length is not None and (served_length > original) != (max_length > original):
        raise UserError(
            f"the server at {url} has max_model_len {served_length}; expected at most {original}: rope_type 'longrope' "
            f"has other factors above, and data.max_prompt_length + data.max_response_length = {max_length} is not"
        )


def engine_factory(
    settings: EngineConfig, config: TrainConfig, model: Path, *, eos_token_ids: Sequence[int]
) -> Callable[[], Engine]:
    """What makes an engine with the weights of a model folder, in this process or, pickled, in another."""
    import torch

    options: Mapping[str, Any] = {
        "dtype": getattr(torch, config.dtype),
        "max_num_seqs": config.rollout.max_num_seqs,
        "eos_token_ids": eos_token_ids,
    }
    own: dict[str, Any] = {}
    if isinstance(settings, RolloutConfig):
        # Prompts that are longer than the model allows were refused before (`check_lengths`).
        own["max_model_len"] = min(config.data.max_length, longest_sequence(model) or config.data.max_length)
        if settings.engine == "vllm":
            own["speculative_config"] = settings.speculative.as_vllm_takes_it()
    if settings.engine == "vllm":
        from gcore_rollout.vllm_engine import VLLMEngine

        return partial(VLLMEngine.from_pretrained, model, **options, **own)
    # A process of its own has a GPU of its own.
    has_process = settings.num_processes > 0 or config.runtime == "ray"
    device = "cuda" if has_process and config.device.startswith("cuda") else config.device
    if settings.is_own:
        return partial(_engine_of_file, str(Path(settings.engine).absolute()), model, device=device, **options)
    from gcore_rollout.hf_engine import HFEngine

    return partial(HFEngine.from_pretrained, model, device=device, **options, **own)


def _engine_of_file(spec: str, model: Path, **options: Any) -> Engine:
    """An engine of the user's, whose file is read in the process that it is for."""
    return load_function(spec, setting="engine")(model, **options)


async def _start(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    instrumentation: Instrumentation,
    *,
    eos_token_ids: Sequence[int],
    weights_dir: str | None = None,
) -> Engine:
    if settings.is_on_servers:
        return _connect(settings, config, model, instrumentation, eos_token_ids=eos_token_ids, weights_dir=weights_dir)
    make = engine_factory(settings, config, model, eos_token_ids=eos_token_ids)
    if settings.num_processes:
        return await _start_processes(settings, config, instrumentation, make)
    return instrumentation.instrument(make(), 0)


def _connect(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    instrumentation: Instrumentation,
    *,
    eos_token_ids: Sequence[int],
    weights_dir: str | None,
) -> Engine:
    from gcore_rollout.replicas import EngineReplicas
    from gcore_rollout.servers.sglang import SGLangServerEngine
    from gcore_rollout.servers.vllm import VLLMServerEngine

    kind = VLLMServerEngine if settings.engine == "vllm_server" else SGLangServerEngine
    connect = partial(
        kind.connect,
        weights_dir=weights_dir,
        model_path=model,
        max_num_seqs=config.rollout.max_num_seqs,
        eos_token_ids=eos_token_ids,
    )
    engines = [instrumentation.instrument(connect(url), place) for place, url in enumerate(settings.urls)]
    return EngineReplicas(engines, announce=instrumentation.announce) if len(engines) > 1 else engines[0]


async def _start_processes(
    settings: EngineConfig, config: TrainConfig, instrumentation: Instrumentation, make: Callable[[], Engine]
) -> Engine:
    """Replicas in processes of their own; one that dies is replaced, on the GPU that it had."""
    from gcore_rollout.engine_process import PRELOAD_HF, PRELOAD_VLLM, EngineProcess
    from gcore_rollout.replicas import EngineReplicas

    preload = PRELOAD_VLLM if settings.engine == "vllm" else PRELOAD_HF
    gpus = _gpus(config.device)
    pids: dict[int, int] = {}
    """By place; of one that is being filled, none."""

    async def start(place: int) -> Engine:
        env = {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else None
        engine = await EngineProcess.start(
            instrumentation.logged(make, place), num_threads=_num_threads(config), env=env, preload=preload
        )
        pids[place] = engine.pid
        return instrumentation.instrument(engine, place)

    async def restart() -> Engine:
        place = min(pids, key=lambda place: Path(f"/proc/{pids[place]}").exists())
        dead = pids.pop(place)
        try:
            return await start(place)
        except BaseException:
            pids[place] = dead
            raise

    starts = (start(place) for place in range(settings.num_processes))
    outcomes = await asyncio.gather(*starts, return_exceptions=True)
    engines = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    for error in outcomes:
        if isinstance(error, BaseException):
            await asyncio.gather(*(engine.close() for engine in engines))
            raise error
    return EngineReplicas(engines, restart=restart, announce=instrumentation.announce)


def _num_threads(config: TrainConfig) -> int:
    """Of each engine process: those that generate at the same time share the cores."""
    judge = config.reward_model.judge.num_processes if config.reward_model.kind == "judge" else 0
    return max(1, config.threads // (max(1, config.rollout.num_processes) + judge))


def _gpus(device: str) -> list[str]:
    """The GPUs of this process, as CUDA_VISIBLE_DEVICES names them; none on CPU."""
    if not device.startswith("cuda"):
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def _settings(config_json: Path) -> dict[str, Any]:
    import json

    settings: dict[str, Any] = json.loads(config_json.read_text())
    return {name: value for name, value in settings.items() if name not in _NOTES}
