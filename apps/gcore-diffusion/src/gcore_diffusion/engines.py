"""Engines of images and of a judge: in this process, or in processes of their own."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.engines import judge_factory
from gcore_rollout import PRELOAD_HF, PRELOAD_VLLM, DiffusersEngine, Engine, EngineProcess, EngineReplicas
from gcore_runs.watched import Watched

_PRELOAD = ("gcore_rollout.engines.diffusion.engine", "diffusers.pipelines.pipeline_utils")


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


async def start_engines(config: DiffusionConfig, model: Path, watched: Watched, *, is_trial: bool = False) -> Engines:
    """Each role's engine in this process, or several in their own, which are replaced if they die.

    Args:
        config: the run's.
        model: the pipeline's folder.
        watched: where they are to be seen.
        is_trial: one of each will do.
    """
    judge = config.reward.judge
    num_engines, num_judges = config.rollout.num_processes, judge.num_processes
    if is_trial:
        num_engines, num_judges = 0, int(judge.engine == "vllm")
    start = partial(_start, config=config, num_processes=max(1, num_engines + num_judges))
    policy = await start(
        sampler_factory(config, model=model), num_engines, replace(watched, role="engine"), preload=_PRELOAD
    )
    if not config.reward.is_judged:
        return Engines(policy=policy, judge=None)
    preload = PRELOAD_VLLM if judge.engine == "vllm" else PRELOAD_HF
    try:
        return Engines(
            policy=policy,
            judge=await start(judge_factory(config), num_judges, replace(watched, role="judge"), preload=preload),
        )
    except BaseException:
        await policy.close()
        raise


async def _start(
    make: Callable[[], Engine[Any, Any]],
    count: int,
    watched: Watched,
    *,
    config: DiffusionConfig,
    num_processes: int,
    preload: tuple[str, ...],
) -> Engine[Any, Any]:
    if not count:
        return watched.timed(make(), 0)
    threads = max(1, config.threads // num_processes)
    numbers = iter(range(10**6))

    async def start() -> Engine[Any, Any]:
        number = next(numbers)
        engine: EngineProcess[Any, Any] = await EngineProcess.start(
            watched.logged(make, number), num_threads=threads, preload=preload
        )
        return watched.timed(engine, number % count)

    engines = await asyncio.gather(*(start() for _ in range(count)))
    return EngineReplicas(engines, restart=start, announce=watched.announce)
