"""Engines of images and of a judge: in this process, or in processes of their own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.judge import judge_factory
from gcore_rollout import Engine
from gcore_rollout.diffusion.engine import DiffusersEngine
from gcore_rollout.engine_process import PRELOAD_HF, PRELOAD_VLLM, EngineProcess
from gcore_rollout.replicas import EngineReplicas
from gcore_runs.instrumented_engine import Instrumentation

_PRELOAD = ("gcore_rollout.diffusion.engine", "diffusers.pipelines.pipeline_utils")


def sampler_factory(config: DiffusionConfig, *, model: Path) -> Callable[[], DiffusersEngine]:
    """What makes an engine of images, in this process or, pickled, in another."""
    rollout = config.rollout
    return partial(
        DiffusersEngine.from_pretrained,
        model.absolute(),
        device=config.engine_device,
        dtype=rollout.dtype,
        max_num_images=rollout.max_num_images,
        options=rollout.pipeline_options,
    )


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Those of a run."""

    policy: Engine[Any, Any]
    judge: Engine[Any, Any] | None
    """None: it has none."""

    async def close(self) -> None:
        """End them."""
        await self.policy.close()
        if self.judge is not None:
            await self.judge.close()


async def start_engines(
    config: DiffusionConfig, model: Path, instrumentation: Instrumentation, *, is_trial: bool = False
) -> Engines:
    """Each role's engine in this process, or several in their own, which are replaced if they die.

    Args:
        config: the run's.
        model: the pipeline's folder.
        instrumentation: where they are to be seen.
        is_trial: one of each will do.
    """
    judge = config.reward.judge
    num_engines, num_judges = config.rollout.num_processes, judge.num_processes
    if is_trial:
        num_engines, num_judges = 0, int(judge.engine == "vllm")
    start = partial(_start, config=config, num_processes=max(1, num_engines + num_judges))
    policy = await start(
        sampler_factory(config, model=model), num_engines, replace(instrumentation, role="engine"), preload=_PRELOAD
    )
    if config.reward.kind != "judge":
        return Engines(policy=policy, judge=None)
    preload = PRELOAD_VLLM if judge.engine == "vllm" else PRELOAD_HF
    try:
        return Engines(
            policy=policy,
            judge=await start(
                judge_factory(config), num_judges, replace(instrumentation, role="judge"), preload=preload
            ),
        )
    except BaseException:
        await policy.close()
        raise


async def _start(
    make: Callable[[], Engine[Any, Any]],
    count: int,
    instrumentation: Instrumentation,
    *,
    config: DiffusionConfig,
    num_processes: int,
    preload: tuple[str, ...],
) -> Engine[Any, Any]:
    if not count:
        return instrumentation.instrument(make(), 0)
    threads = max(1, config.threads // num_processes)
    numbers = iter(range(10**6))

    async def start() -> Engine[Any, Any]:
        number = next(numbers)
        engine: EngineProcess[Any, Any] = await EngineProcess.start(
            instrumentation.logged(make, number), num_threads=threads, preload=preload
        )
        return instrumentation.instrument(engine, number % count)

    engines = await asyncio.gather(*(start() for _ in range(count)))
    return EngineReplicas(engines, restart=start, announce=instrumentation.announce)
