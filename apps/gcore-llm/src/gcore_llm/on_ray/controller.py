"""What a controller does in its own process before and after the program: it makes the roles that are its own."""

from collections.abc import Awaitable, Callable
from typing import Any

from gcore_controller import Context
from gcore_llm.evaluate import Evaluation
from gcore_llm.micro_batches import sample_flops
from gcore_llm.modality import Job, rlhf_program
from gcore_llm.on_ray.learner_part import RanksPart
from gcore_llm.rewards import Rewards
from gcore_llm.roles import Roles, build_environment
from gcore_runs.on_ray.connecting import own_services
from gcore_runs.on_ray.reports import Reports
from gcore_runs.on_ray.services import Handles


def controller_program(job: Job, tokenizer: Any) -> Callable[[Context[Handles]], Awaitable[None]]:
    """The program of a job, for controllers that make their roles themselves."""

    async def program(ctx: Context[Handles]) -> None:
        config = job.config
        async with own_services(ctx, config) as own:
            rewards = await Rewards.start(config, judge=own.judge)
            try:
                roles = Roles(
                    policy=own.policy,
                    reward=rewards.runner,
                    comparison=rewards.comparison,
                    tokenizer=tokenizer,
                    environment=build_environment(config, tokenizer, rewards.runner),
                    policy_slots=own.num_engines * config.rollout.max_num_seqs,
                    learner=RanksPart(
                        ctx.roles.ranks, ctx.group, own.devices, cost_of=lambda batch: sample_flops(job.workload, batch)
                    ),
                    devices=own.devices,
                    owns_process=True,
                )
                await rlhf_program(job, Reports[Evaluation](ctx.report))(ctx.with_roles(roles))
            finally:
                await rewards.close()

    return program
