"""Images of a finished run's policy."""

from pathlib import Path

import numpy as np

from gcore_diffusion.config import DiffusionConfig
from gcore_diffusion.sampling.grids import write_grid
from gcore_diffusion.sampling.image_sampling import images
from gcore_rollout import DiffusersEngine, ImageRequest, ImageSampling
from gcore_runs.errors import UserError, check_at_least
from gcore_runs.run_folder import RunFolder
from gcore_runs.settings.values import resolve


async def sample_run(
    path: Path, prompt: str, *, n: int, num_inference_steps: int, guidance_scale: float, seed: int, out: Path
) -> None:
    """Write a PNG file with a grid of images by a finished run's policy.

    Raises:
        UserError: no such run, or one that is not finished; a number out of its bounds.
    """
    for name, value, lowest in (("n", n, 1), ("num_inference_steps", num_inference_steps, 0)):
        check_at_least(name, value, lowest)
    run = RunFolder.existing(path)
    config = resolve(run.load_config(DiffusionConfig))
    if not run.export.is_dir():
        raise UserError(f"{path} has no export: the run is not finished; the command train continues it")
    rollout = config.rollout
    engine = DiffusersEngine.from_pretrained(
        run.export, device=config.device, dtype=rollout.dtype, options=rollout.pipeline_options
    )
    try:
        sampling = ImageSampling(
            num_inference_steps=num_inference_steps or rollout.eval_num_inference_steps or rollout.num_inference_steps,
            guidance_scale=guidance_scale or rollout.eval_guidance_scale or rollout.guidance_scale,
            size=rollout.size if rollout.size != (0, 0) else None,
        )
        request = ImageRequest(request_id="sample", prompt=prompt, sampling=sampling, n=n, seed=seed)
        found = await images(engine, [request])
    finally:
        await engine.close()
    write_grid(out, np.stack([s.image for s in found]), [prompt] * n, per_prompt=n)
