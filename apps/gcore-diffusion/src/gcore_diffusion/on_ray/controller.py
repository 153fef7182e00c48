"""What a controller does in its own process before and after the program: it makes the roles that are its own."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from gcore_controller import Context
from gcore_diffusion.evaluate import Evaluation
from gcore_diffusion.modality import Job, diffusion_program
from gcore_diffusion.on_ray.learner_part import RanksPart
from gcore_diffusion.rewards import build_rewards
from gcore_diffusion.roles import Roles
from gcore_runs.on_ray.connecting import own_services
from gcore_runs.on_ray.reports import Reports
from gcore_runs.on_ray.services import Handles


def controller_program(job: Job) -> Callable[[Context[Handles]], Awaitable[None]]:
    """The program of a job, for controllers that make their roles themselves."""

    async def program(ctx: Context[Handles]) -> None:
        async with own_services(ctx, job.config) as own:
            # Ray gives controllers no GPU.
            rewards = build_rewards(replace(job.config, device="cpu"), judge=own.judge)
            learner = RanksPart(
                ctx.roles.ranks, ctx.group, own.devices, cost_of=lambda batch: sum(max(1, s.num_steps) for s in batch)
            )
            roles = Roles(policy=own.policy, rewards=rewards, devices=own.devices, learner=learner, owns_process=True)
            await diffusion_program(job, Reports[Evaluation](ctx.report))(ctx.with_roles(roles))

    return program
