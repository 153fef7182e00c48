"""Engines of a policy or a judge: in this process, in processes of their own, or on servers."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gcore_ckpt import load
from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.data.prompts import longest_sequence
from gcore_llm.settings.engine_config import EngineConfig
from gcore_rollout import (
    Engine,
    EngineDiedError,
    EngineReplicas,
    ServerClient,
    connect_servers,
    engine_factory as factory_of,
    load_function,
    start_replicas,
    visible_gpus,
)
from gcore_runs.errors import UserError
from gcore_runs.loop.instrumented_engine import NO_INSTRUMENTATION, Instrumentation

# Entries of a model's config.json that do not change what the model computes.
_NOTES = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


async def start_policy(
    config: TrainConfig,
    model: Path,
    *,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation = NO_INSTRUMENTATION,
) -> Engine:
    """Start the policy's engine, with the weights of a model folder.

    Raises:
        RolloutError: it does not start, or a server cannot take the weights.
    """
    rollout = config.rollout
    if not rollout.is_on_servers:
        return await _start(rollout, config, model, instrumentation, eos_token_ids=eos_token_ids)

    def connect() -> Engine:
        return _connect(
            rollout, config, model, instrumentation, eos_token_ids=eos_token_ids, weights_dir=rollout.weights_dir
        )

    # Servers may have the last weights of another run. A new engine calls the weights that they have version 0.
    engine = connect()
    try:
        await engine.update_weights(load(model).items(), version=1)
    finally:
        await engine.close()
    return connect()


async def start_judge(
    config: TrainConfig,
    model: Path,
    *,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation = NO_INSTRUMENTATION,
) -> Engine:
    """Start a judge's engine.

    Raises:
        RolloutError: it does not start.
    """
    settings, instrumentation = config.reward_model.judge, replace(instrumentation, role="judge")
    if settings.is_on_servers:
        return _connect(settings, config, model, instrumentation, eos_token_ids=eos_token_ids)
    return await _start(settings, config, model, instrumentation, eos_token_ids=eos_token_ids)


def check_engine(settings: EngineConfig, model: Path, *, setting: str, max_length: int | None = None) -> None:
    """Import an engine of the user's own, or ask every server which model it runs, as far as it reports that.

    Args:
        settings: of the engine.
        model: folder of the model that it should run.
        setting: the name of the settings, for errors.
        max_length: longest prompt and response together, in tokens.

    Raises:
        RewardError: there is no such function.
        UserError: a server does not answer, or runs another model, one that takes fewer tokens, or one whose rotary
            embeddings (rope_type ``longrope``) it computes for another length than the trainer does.
    """
    if settings.kind.is_own:
        load_function(settings.engine, setting=f"{setting}.engine")
    for url in settings.urls:
        try:
            served = ServerClient(url, timeout_s=30.0).call_blocking("GET", "/v1/models")["data"][0]
        except EngineDiedError as error:
            raise UserError(f"no {settings.engine} answers at {url}: {error}") from error
        root = Path(served.get("root") or "")
        theirs = root / "config.json"
        if theirs.is_file() and _settings(theirs) != _settings(model / "config.json"):
            raise UserError(f"the server at {url} runs {root}; expected {model}")
        served_length = served.get("max_model_len")
        if max_length is None:
            continue
        if served_length is not None and served_length < max_length:
            raise UserError(
                f"the server at {url} takes {served_length} tokens; expected at least data.max_prompt_length + "
                f"data.max_response_length = {max_length}"
            )
        _check_longrope(settings, url, model, served_length, max_length)


def _check_longrope(settings: EngineConfig, url: str, model: Path, served_length: int | None, max_length: int) -> None:
    """Refuse a server that chooses other factors of ``longrope`` than the trainer, which chooses them by max_length."""
    from transformers import AutoConfig

    rope: Any = getattr(AutoConfig.from_pretrained(model).get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    if settings.kind.has_rope_of_batch:
        raise UserError(
            f"rollout.engine is {settings.engine!r}; expected hf, vllm or vllm_server for rope_type 'longrope': it "
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
    """Return what makes an engine with the weights of a model folder, in this process or, pickled, in another."""
    import torch

    own: dict[str, Any] = {}
    if isinstance(settings, RolloutConfig):
        # Prompts that are longer than the model allows were refused before (`check_lengths`).
        own["max_model_len"] = min(config.data.max_length, longest_sequence(model) or config.data.max_length)
        own["speculative_config"] = settings.speculative.as_vllm_takes_it()
    # A process of its own has a GPU of its own.
    has_process = settings.num_processes > 0 or config.runtime == "ray"
    return factory_of(
        settings.engine,
        model,
        device="cuda" if has_process and config.device.startswith("cuda") else config.device,
        dtype=getattr(torch, config.dtype),
        max_num_seqs=config.rollout.max_num_seqs,
        eos_token_ids=eos_token_ids,
        **own,
    )


async def _start(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    instrumentation: Instrumentation,
    *,
    eos_token_ids: Sequence[int],
) -> Engine:
    """Start an engine in this process, or replicas in processes of their own."""
    make = engine_factory(settings, config, model, eos_token_ids=eos_token_ids)
    if not settings.num_processes:
        return instrumentation.instrument(make(), 0)
    # All processes that generate at the same time share the cores.
    judges = config.reward_model.judge.num_processes if config.reward_model.is_judge else 0
    return await start_replicas(
        lambda place: instrumentation.logged(make, place),
        settings.num_processes,
        num_threads=max(1, config.threads // (max(1, config.rollout.num_processes) + judges)),
        preload=settings.kind.preload,
        gpus=visible_gpus(config.device),
        wrap=instrumentation.instrument,
        announce=instrumentation.announce,
    )


def _connect(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    instrumentation: Instrumentation,
    *,
    eos_token_ids: Sequence[int],
    weights_dir: str | None = None,
) -> Engine:
    servers = connect_servers(
        settings.engine,
        settings.urls,
        weights_dir=weights_dir,
        model_path=model,
        max_num_seqs=config.rollout.max_num_seqs,
        eos_token_ids=eos_token_ids,
    )
    engines = [instrumentation.instrument(server, place) for place, server in enumerate(servers)]
    return EngineReplicas(engines, announce=instrumentation.announce) if len(engines) > 1 else engines[0]


def _settings(config_json: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads(config_json.read_text())
    return {name: value for name, value in settings.items() if name not in _NOTES}
