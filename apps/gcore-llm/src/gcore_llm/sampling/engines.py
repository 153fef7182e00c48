"""Engines of a policy or a judge: in this process, in processes of their own, or on servers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gcore_ckpt import load
from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.data.prompts import longest_sequence
from gcore_rollout import (
    Engine,
    EngineReplicas,
    RequestError,
    RolloutError,
    check_servers,
    connect_servers,
    engine_factory as factory_of,
    load_function,
    visible_gpus,
)
from gcore_runs.engines import NO_INSTRUMENTATION, EngineConfig, Instrumentation
from gcore_runs.errors import UserError


async def start_policy(
    config: TrainConfig,
    model: Path,
    *,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation = NO_INSTRUMENTATION,
) -> Engine:
    """Start the policy's engine, with the weights of a model folder."""
    if config.rollout.is_on_servers:
        # Servers may have the last weights of another run. A new engine calls the weights that they have version 0.
        engine = await start_engine(config.rollout, config, model, eos_token_ids, instrumentation)
        try:
            await engine.update_weights(load(model).items(), version=1)
        finally:
            await engine.close()
    return await start_engine(config.rollout, config, model, eos_token_ids, instrumentation)


def check_engine(settings: EngineConfig, model: Path, *, setting: str, max_length: int | None = None) -> None:
    """Import an engine of the user's own, or ask every server which model it runs; see `check_servers`.

    Args:
        model: folder of the model that it should run.
        setting: the name of the settings, for errors.
        max_length: longest prompt and response together, in tokens.

    Raises:
        RewardError: there is no such function.
        UserError: a server does not answer, or does not fit.
    """
    if settings.kind.is_own:
        load_function(settings.engine, setting=f"{setting}.engine")
    lengths = "data.max_prompt_length + data.max_response_length"
    try:
        check_servers(settings.engine, settings.urls, model, max_length=max_length, length_settings=lengths)
    except RolloutError as error:
        raise UserError(f"{setting}.{error}" if isinstance(error, RequestError) else str(error)) from error


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


async def start_engine(
    settings: EngineConfig,
    config: TrainConfig,
    model: Path,
    eos_token_ids: Sequence[int],
    instrumentation: Instrumentation,
) -> Engine:
    """Connect to the servers of the policy or a judge, or start its engine."""
    if settings.is_on_servers:
        servers = connect_servers(
            settings.engine,
            settings.urls,
            weights_dir=settings.weights_dir if isinstance(settings, RolloutConfig) else None,
            model_path=model,
            max_num_seqs=config.rollout.max_num_seqs,
            eos_token_ids=eos_token_ids,
        )
        engines = [instrumentation.instrument(server, place) for place, server in enumerate(servers)]
        return EngineReplicas(engines, announce=instrumentation.announce) if len(engines) > 1 else engines[0]
    # All processes that generate at the same time share the cores.
    judges = config.reward_model.judge.num_processes if config.reward_model.is_judge else 0
    return await instrumentation.start(
        engine_factory(settings, config, model, eos_token_ids=eos_token_ids),
        settings.num_processes,
        num_threads=max(1, config.threads // (max(1, config.rollout.num_processes) + judges)),
        preload=settings.kind.preload,
        gpus=visible_gpus(config.device) if settings.num_processes else (),
    )
