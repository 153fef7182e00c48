"""The controllers' program: generation, rewarding, preparation and training of images."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from gcore_controller import Context, Program, Recorder, seconds_by_stage
from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.evaluate import Evaluation, evaluate
from gcore_diffusion.preparation import prepared, updates
from gcore_diffusion.prompts import PromptSets
from gcore_diffusion.roles import Roles
from gcore_diffusion.sampling import Batch, Sampling, State
from gcore_runs.devices import generation_metrics, merged
from gcore_runs.job import RunJob
from gcore_runs.spans import on_wall_clock


@dataclass(frozen=True, kw_only=True)
class Job(RunJob[DiffusionConfig]):
    """What the program needs to know beyond its roles."""

    prompts: PromptSets


def diffusion_program(job: Job, recorder: Recorder[Evaluation]) -> Program[Roles, None]:
    """The program of one job, to be run by a runtime on every controller."""

    async def program(ctx: Context[Roles]) -> None:
        await _Controller(ctx, job, recorder).run()

    return program


class _Controller:
    """One controller's slice of the run."""

    def __init__(self, ctx: Context[Roles], job: Job, recorder: Recorder[Evaluation]) -> None:
        self._ctx = ctx
        self._job = job
        self._config = job.config
        self._recorder = recorder
        state = None if job.controllers is None else _share(job.controllers, ctx.rank, ctx.world_size)
        self._sampling = Sampling(ctx, job.config, job.prompts, state)
        # Two for each step: what is evaluated may be an average.
        self._version = 2 * job.first_step

    async def run(self) -> None:
        """The rest of the job."""
        ctx, job, trainer = self._ctx, self._job, self._config.trainer
        if job.is_policy_behind:
            await self._update_policy(averaged=False)
        else:
            await ctx.roles.learner.check_policy(ctx.roles.policy)
        if not job.is_evaluated:
            await self.evaluate(job.first_step)
        ctx.roles.devices.drain()
        for step in range(job.first_step + 1, trainer.total_training_steps + 1):
            await self.step(step)
            if step % trainer.test_freq == 0 or step == trainer.total_training_steps:
                await self.evaluate(step)

    async def evaluate(self, step: int) -> None:
        """Images of held-out prompts, recorded by rank 0."""
        if not self._job.prompts.val:
            return
        has_average = bool(self._config.actor.ema_decay) and step > 0
        if has_average:
            await self._update_policy(averaged=True)
        result = await evaluate(self._ctx, self._config, self._job.prompts.val)
        if has_average:
            await self._update_policy(averaged=False)
        if self._ctx.rank == 0:
            await self._recorder.evaluated(step, result)
        self._ctx.timer.drain()
        self._ctx.roles.devices.drain()

    async def step(self, step: int) -> None:
        """Generation, rewarding, preparation, training, and the new weights back to the engine."""
        ctx = self._ctx
        start_s = ctx.clock()
        batch = await self._sampling.next(step)
        if ctx.rank == 0:
            await self._recorder.updating()
        metrics = batch.metrics | (await self._train(step, batch) if batch.groups_of_all else {})
        step_s = ctx.clock() - start_s
        spans = on_wall_clock(ctx.timer.drain(), ctx.clock())
        own_devices = ctx.roles.owns_process or ctx.rank == 0
        generated = Counter(ctx.roles.devices.generated) if own_devices else Counter[str]()
        own = (spans, batch.state, ctx.roles.devices.drain() if own_devices else {}, generated)
        trained, states, devices, generated = zip(*await ctx.group.all_gather(own), strict=True)
        if ctx.rank == 0:
            metrics |= {f"timing_s/{stage}": value for stage, value in seconds_by_stage(spans).items()}
            metrics |= {"timing_s/step": step_s, "perf/throughput": metrics.get("perf/num_images", 0.0) / step_s}
            await self._recorder.stepped(step, metrics | generation_metrics(generated), list(trained), merged(devices))
            await self._recorder.reached(step, list(states))
        await ctx.group.barrier()

    async def _train(self, step: int, batch: Batch) -> dict[str, float]:
        ctx, config, learner = self._ctx, self._config, self._ctx.roles.learner
        with ctx.timer.stage("prepare"):
            each = updates(
                prepared(batch.share, config, step=step, std=batch.std),
                num_updates=config.actor.num_updates,
                micro_batch_size=config.actor.micro_batch_size,
                num_parts=learner.num_replicas,
            )
        with ctx.timer.stage("train"):
            found = [metrics for batches in each if (metrics := await learner.train_step("actor", batches))]
        with ctx.timer.stage("sync"):
            await self._update_policy(averaged=False)
        means = {name: sum(m[name] for m in found) / len(found) for name in (found[0] if found else {})}
        if found and "actor/ratio_dev" in found[0]:
            # Of the first update's images, by the weights that made them: what the sampler and the trainer differ by.
            means["training/rollout_ratio_dev"] = found[0]["actor/ratio_dev"]
        return means

    async def _update_policy(self, *, averaged: bool) -> None:
        self._version += 1
        await self._ctx.roles.learner.update_policy(self._ctx.roles.policy, version=self._version, averaged=averaged)


def _share(states: list[State], rank: int, world_size: int) -> State:
    """A controller's state from those of a run with any number of controllers: each group has one owner again."""
    if len(states) == world_size:
        return states[rank]
    groups: list[Any] = [group for state in states for group in state["sampler"]["surplus"]]
    mine = sorted(groups, key=lambda g: g["ticket"])[rank::world_size]
    return {**states[0], "sampler": {**states[0]["sampler"], "surplus": mine}}
