"""Write an RL loop of your own from the packages: an engine, a trainer, and two controllers.

``uv run python examples/my_loop.py`` trains a tiny random model by GRPO to prefer even tokens, in seconds. Both
controllers run `program`: each samples its own prompts, the first one trains on everything, and both wait for the
engine's new weights. `gcore_controller.run_ray` runs programs like it on a Ray cluster.
"""

import asyncio
import tempfile

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gcore_controller import Context, run_inline
from gcore_rollout import HFEngine, Request, SamplingParams
from gcore_trainer import (
    OptimizerConfig,
    PackedModel,
    PolicyLossConfig,
    PolicyObjective,
    Sample,
    TorchTrainer,
    grpo_advantages,
)

NUM_STEPS, NUM_PROMPTS = 20, 8
Roles = tuple[HFEngine, TorchTrainer]


async def sample(engine: HFEngine, prompt_index: int) -> tuple[list[Sample], list[float]]:
    """Return a group of samples with their advantages, and their scores: the share of even tokens in each."""
    prompt = np.random.default_rng(prompt_index).integers(1, 64, 4)
    name, sampling = f"prompt {prompt_index}", SamplingParams(max_tokens=8)
    request = Request(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, n=16, seed=prompt_index
    )
    group = [completion async for completion in engine.generate([request])]
    scores = [float(np.mean(completion.token_ids % 2 == 0)) for completion in group]
    samples = [
        Sample(
            prompt_ids=prompt,
            response_ids=c.token_ids,
            advantages=np.full(c.token_ids.size, advantage),
        )
        for c, advantage in zip(group, grpo_advantages(scores), strict=True)
    ]
    return samples, scores


async def program(ctx: Context[Roles]) -> None:
    """Make every step, on every controller."""
    engine, trainer = ctx.roles
    for step in range(1, NUM_STEPS + 1):
        first = (step * ctx.world_size + ctx.rank) * NUM_PROMPTS
        groups = await asyncio.gather(
            *(sample(engine, index) for index in range(first, first + NUM_PROMPTS))
        )
        micro_batches = await ctx.group.all_gather([s for samples, _ in groups for s in samples])
        mean = (
            await ctx.group.all_reduce(float(np.mean([scores for _, scores in groups])))
            / ctx.world_size
        )
        if ctx.rank == 0:
            metrics = trainer.train_step(micro_batches)
            await engine.update_weights(trainer.export_weights(), version=step)
            print(
                f"step {step:2d}  even tokens {mean:.2f}  gradient norm {metrics['actor/grad_norm']:.2f}"
            )
        await ctx.group.barrier()


def main() -> None:
    torch.manual_seed(0)
    tiny = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(tiny).save_pretrained(folder)
        engine = HFEngine.from_pretrained(folder, eos_token_ids=[1])
        packed = PackedModel.from_pretrained(folder)
    objective, optimizer = PolicyObjective(PolicyLossConfig()), OptimizerConfig(lr=1e-2)
    trainer = TorchTrainer(packed, optimizer=optimizer, objective=objective)
    asyncio.run(run_inline(program, roles=(engine, trainer), world_size=2))


if __name__ == "__main__":
    main()
