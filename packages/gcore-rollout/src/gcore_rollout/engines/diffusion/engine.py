"""The engine of images: it runs an unmodified pipeline of diffusers, and records log-probabilities of its steps."""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.diffusion.arrays import in_dtype
from gcore_rollout.engines.diffusion.calls import image_conditions, same_conditions, timestep_map
from gcore_rollout.engines.diffusion.compiled import compile_blocks
from gcore_rollout.engines.diffusion.kernels import FlowODE
from gcore_rollout.engines.diffusion.recording import Recorded, StepAbortedError, Tape, load_pipeline
from gcore_rollout.engines.diffusion.text_encoders import HostedEncoders
from gcore_rollout.engines.diffusion.types import (
    SCALARS,
    STACKED,
    Conditions,
    ImageRequest,
    ImageSample,
    ImageSampling,
    Trajectory,
)
from gcore_rollout.engines.protocol import HeldWeights
from gcore_rollout.engines.queueing import Control, QueueingEngine, Sample, SampleFilter, check_weights, sample_seeds
from gcore_rollout.errors import RequestError, RolloutError, UnsupportedModelError
from gcore_rollout.weight_sync.checked import held

_Image = Sample[ImageRequest, ImageSample]

_PROBED = (1, 2)
"""Sizes of two batches that show which of the model's arguments have a row for each image."""
_SCALES_BELOW = {"ZImagePipeline": 1.0}
"""Pipelines whose guidance is c + scale (c - u), and how much less than in u + scale (c - u) the scale then is."""
_PROBED_STEPS = 2
"""Steps of these batches: the timestep of a second one shows what the first leaves open."""


class DiffusersEngine(QueueingEngine[ImageRequest, ImageSample]):
    """Makes images by a pipeline, in batches, in a thread; made by `from_pretrained`, and bound to one event loop.

    The requests of a batch have equal settings; its images start together and end together. An image depends on its
    seed alone, up to rounding in batches of different sizes. `stats` counts prompts, and denoising steps summed over
    images.

    The methods `pause`, `update_weights` and `sleep` wait for the running batch; `abort` ends it between two steps if
    none of its images is wanted any more. Aborted images start again if they are requested again.

    Args:
        pipeline: a pipeline of diffusers; its scheduler is replaced.
        max_num_images: largest batch.
        options: further arguments of the pipeline's call, such as max_sequence_length or num_frames.
        size: height and width in pixels of the images that it is tried on; None: the pipeline's own.
        device: that it works on; None: the one that the pipeline is on.
        compiles: whether the blocks of the denoiser are compiled, which takes a minute or more.
        offload_text_encoders: whether the text encoders are on the device only while prompts are encoded.

    Attributes:
        pipeline: The pipeline.

    Raises:
        UnsupportedModelError: its scheduler has no log-probability, or the pipeline makes something unknown of its
            model's output.
    """

    _HOW_TO_OPEN = "make a new one"

    def __init__(
        self,
        pipeline: Any,
        *,
        max_num_images: int = 64,
        options: Mapping[str, Any] | None = None,
        size: tuple[int, int] | None = None,
        device: str | None = None,
        compiles: bool = False,
        offload_text_encoders: bool = False,
    ) -> None:
        if max_num_images < 1:
            raise RolloutError(f"max_num_images is {max_num_images}; expected at least 1")
        super().__init__()
        pipeline.set_progress_bar_config(disable=True)
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                component.eval().requires_grad_(False)
        vae: Any = getattr(pipeline, "vae", None)
        if hasattr(vae, "enable_slicing"):
            vae.enable_slicing()
        self._recorded = Recorded(pipeline)
        self.pipeline = pipeline
        self._device: torch.device = pipeline.device if device is None else torch.device(device)
        self._hosted = HostedEncoders(pipeline, self._device) if offload_text_encoders else None
        self._move_pipeline(self._device)
        if compiles:
            compile_blocks(self._recorded.denoiser)
        self._dtype = next(self._recorded.denoiser.parameters()).dtype
        self._accepted = set(inspect.signature(pipeline.__call__).parameters)
        self._options = dict(options or {})
        if unknown := sorted(self._options.keys() - self._accepted):
            raise UnsupportedModelError(
                f"{type(pipeline).__name__} has no {unknown[0]}: it takes {sorted(self._accepted)}"
            )
        self._max_num_images = max_num_images
        self._running: tuple[Tape, list[_Image]] | None = None
        self._turn = asyncio.Lock()
        """Held by the running batch, and by methods that change the model."""
        self._worker: asyncio.Task[None] | None = None
        self._per_image, self._timestep_map = self._probe(size)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, device: str = "cpu", dtype: str = "float32", **settings: Any) -> Self:
        """Load a local folder with `load_pipeline`, with weights of ``dtype``: float32, bfloat16 or float16.

        The ``settings`` are further arguments of the class.
        """
        return cls(load_pipeline(path, dtype=getattr(torch, dtype)), device=device, **settings)

    async def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Replace the weights of the denoiser alone, under the names that diffusers has for them."""
        async with self._controlling():
            self._check_update(version)
            own = dict(self._recorded.denoiser.state_dict(keep_vars=True))
            new = dict(weights)
            shapes = {name: tuple(p.shape) for name, p in self._recorded.denoiser.named_parameters()}
            check_weights(shapes, new, optional=frozenset(own.keys() - shapes.keys()))
            with torch.no_grad():
                for name, tensor in new.items():
                    own[name].copy_(tensor)
            self._has_taken(version)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights:
        self._check_open()
        own: dict[str, torch.Tensor] = dict(self._recorded.denoiser.named_parameters())
        wanted = own if names is None else names
        return HeldWeights(version=self._version, tensors=[held(name, own[name].detach) for name in wanted])

    async def close(self) -> None:
        if not self._is_closed:
            await self.abort()
        self._is_closed = True
        if self._worker is not None:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker

    @asynccontextmanager
    async def _controlling(self) -> AsyncGenerator[None]:
        self._check_open()
        async with self._turn:
            yield

    async def _control(self, name: Control) -> None:
        if name in ("sleep", "discard"):
            self._move_pipeline(torch.device("cpu"))
            if self._device.type != "cpu":
                # Other processes on the device need it.
                torch.accelerator.empty_cache()
        elif name in ("wake", "wake_weights"):
            self._move_pipeline(self._device)

    def _move_pipeline(self, device: torch.device) -> None:
        """Move all models but those that stay in host memory."""
        staying = self._hosted.modules if self._hosted is not None else []
        for component in self.pipeline.components.values():
            if isinstance(component, torch.nn.Module) and component not in staying:
                component.to(device)

    def _num_running(self) -> int:
        return len(self._running[1]) if self._running else 0

    def _remove_running(self, which: SampleFilter[ImageRequest, ImageSample], *, as_aborted: bool) -> list[_Image]:
        """End the batch if none of its images is wanted any more; its images then come as aborted."""
        del as_aborted
        if self._running is not None:
            tape, batch = self._running
            tape.is_aborted |= all(which(image) or image.call.abandoned for image in batch)
        return []

    def _start(self) -> None:
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())

    def _check_request(self, request: ImageRequest) -> None:
        if "prompt" not in self._accepted:
            self._class_of(request.prompt)
        if not isinstance(request.sampling.kernel, FlowODE):
            self._recorded.kernel(request.sampling.kernel)
        if request.sampling.size is not None and "height" not in self._accepted:
            raise RequestError(f"size is {request.sampling.size}; expected None, because the pipeline has one size")

    def _class_of(self, prompt: str) -> int:
        names: Mapping[str, int] = getattr(self.pipeline, "labels", None) or {}
        if prompt in names:
            return names[prompt]
        if not prompt.isdecimal():
            known = ", ".join(list(names)[:5])
            raise RequestError(
                f"prompt is {prompt!r}; expected the number of a class{f', or a name: {known}' if known else ''}"
            )
        return int(prompt)

    async def _work(self) -> None:
        while self._waiting and not (self._is_paused or self._is_asleep):
            async with self._turn:
                if self._waiting and not (self._is_paused or self._is_asleep):
                    await self._make(self._next_batch())

    def _next_batch(self) -> list[_Image]:
        """Take the first waiting image and the ones that can be batched with it."""
        sampling = self._waiting[0].request.sampling
        batch = [image for image in self._waiting if image.request.sampling == sampling][: self._max_num_images]
        self._remove_waiting(batch.__contains__)
        return batch

    async def _make(self, batch: list[_Image]) -> None:
        sampling = batch[0].request.sampling
        generators = [image_generator(image.request.seed, image.index) for image in batch]
        with self._recorded.taping(sampling, generators) as tape:
            self._running = tape, batch
            version = self._version
            prompts = [image.request.prompt for image in batch]
            thread = asyncio.create_task(asyncio.to_thread(self._call, prompts, sampling, generators))
            try:
                pixels = await asyncio.shield(thread)
                self._hand_over(batch, tape, pixels, version)
            except asyncio.CancelledError:
                tape.is_aborted = True
                await asyncio.wait([thread])
                raise
            except StepAbortedError:
                for image in batch:
                    image.abort()
                return
            except Exception as error:
                for call in {image.call for image in batch}:
                    call.finished.put_nowait(error)
                return
            finally:
                self._running = None
        self._prompt_tokens += len({image.request.request_id for image in batch})
        self._completion_tokens += len(batch) * sampling.num_inference_steps

    def _hand_over(self, batch: list[_Image], tape: Tape, pixels: NDArray[np.uint8], version: int) -> None:
        """Hand over a batch of B images with pixels [B, ...]."""
        assert tape.form is not None
        assert tape.final is not None
        final = tape.final.cpu().numpy()
        form, (rows, shared) = tape.form, self._split(tape)
        with_prompt, without = form.halves(rows, len(batch)) if form.guidance_scale is not None else (rows, None)
        for row, (image, trajectory) in enumerate(zip(batch, _trajectories(tape.steps, final), strict=True)):
            sample = ImageSample(
                request_id=image.request.request_id,
                index=image.index,
                image=pixels[row],
                latents=final[row],
                trajectory=in_dtype(trajectory, self._dtype),
                conditions=with_prompt[row],
                negative_conditions=without[row] if without is not None else None,
                shared_conditions=shared,
                guidance_scale=form.guidance_scale,
                keeps_norm=form.keeps_norm,
                is_negated=form.is_negated,
                timestep_map=self._timestep_map,
                weight_version=version,
                finish_reason="stop",
            )
            image.call.finished.put_nowait(sample)

    def _split(self, tape: Tape) -> tuple[list[Conditions], Conditions]:
        """Return the conditions of each row of a step's calls, and those that all share."""
        first, *others = ({n: v for n, v in c.items() if n not in self._per_image} for c in tape.conditions)
        if not all(same_conditions(first, other) for other in others):
            raise UnsupportedModelError(
                f"the pipeline's two calls of its model have other {sorted(first)}; expected the same in both"
            )
        parts = [image_conditions(conditions, self._per_image) for conditions in tape.conditions]
        return [row for rows, _ in parts for row in rows], parts[0][1]

    @torch.no_grad()
    def _call(
        self, prompts: Sequence[str], sampling: ImageSampling, generators: Sequence[torch.Generator]
    ) -> NDArray[np.uint8]:
        """Run the pipeline and return the images [B, H, W, 3], or the videos [B, F, H, W, 3]."""
        options = dict(self._options)
        if "prompt" in self._accepted:
            # Each prompt is encoded once.
            unique = list(dict.fromkeys(prompts))
            repeats = len(prompts) // len(unique)
            is_even = [p for p in unique for _ in range(repeats)] == list(prompts)
            count = next((n for n in ("num_images_per_prompt", "num_videos_per_prompt") if n in self._accepted), None)
            if is_even and count is not None:
                options |= {"prompt": unique, count: repeats}
            else:
                options |= {"prompt": list(prompts)}
        else:
            options |= {"class_labels": [self._class_of(p) for p in prompts]}
        options |= self._guidance(sampling.guidance_scale, len(options.get("prompt", ())))
        if sampling.size is not None:
            options |= dict(zip(("height", "width"), sampling.size, strict=True))
        has_decoder = getattr(self.pipeline, "vae", None) is not None
        # The first field is called images or frames.
        images: torch.Tensor = self.pipeline(
            **options,
            generator=list(generators),
            num_inference_steps=sampling.num_inference_steps,
            output_type="pt" if has_decoder else "latent",
        )[0]
        pixels = images.float() if has_decoder else images.float() / 2 + 0.5
        return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).movedim(-3, -1).cpu().numpy()

    def _guidance(self, scale: float, num_prompts: int) -> dict[str, Any]:
        """Return the arguments of guidance; models that are given their scale as an input have no second pass."""
        config: Any = self._recorded.denoiser.config
        if "true_cfg_scale" not in self._accepted or config.get("guidance_embeds"):
            return {"guidance_scale": scale - _SCALES_BELOW.get(type(self.pipeline).__name__, 0.0)}
        return {"true_cfg_scale": scale} | ({"negative_prompt": [" "] * num_prompts} if scale > 1 else {})

    def _probe(self, size: tuple[int, int] | None) -> tuple[set[str], tuple[float, float] | None]:
        """Make two batches; return which of the model's arguments have a row for each image, and the timestep map."""
        has_rows: dict[str, bool] = {}
        prompts = ("probe", "another probe") if "prompt" in self._accepted else ("0", "0")
        sampling = ImageSampling(num_inference_steps=_PROBED_STEPS, size=size)
        times: list[tuple[float, float]] = []
        for count in _PROBED:
            generators = [image_generator(0, i) for i in range(count)]
            with self._recorded.taping(sampling, generators) as tape:
                try:
                    self._call(prompts[:count], sampling, generators)
                except (AttributeError, IndexError, TypeError, ValueError) as error:
                    if isinstance(error, RolloutError):
                        raise
                    kind = type(self.pipeline).__name__
                    settings = f"size {size} and {self._options}" if self._options else f"size {size}"
                    raise UnsupportedModelError(
                        f"{kind} makes no image of a prompt alone with {settings}: {error}"
                    ) from error
            if not tape.conditions:
                raise UnsupportedModelError("the pipeline makes no step: its model was never called")
            for name, value in tape.conditions[0].items():
                is_long = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.ndim > 0)
                # Masks, which some pipelines only pass for prompts of several lengths, are in one batch alone.
                has_rows[name] = has_rows.get(name, True) and is_long and len(value) == count
            times = tape.times
        per_image = {name for name, has in has_rows.items() if has}
        return per_image, timestep_map(times, self._recorded.num_train_timesteps)


def _trajectories(steps: Sequence[Mapping[str, Any]], final: NDArray[np.float32]) -> Iterator[Trajectory]:
    """Yield the trajectory of each image, from the recorded steps and the final latents [B, ...] of its batch."""
    stacked: dict[str, NDArray[np.float32]] = {name: np.zeros((0, *final.shape), np.float32) for name in STACKED}
    stacked["log_probs"] = np.zeros((0, len(final)), np.float32)
    if steps:
        stacked = {name: torch.stack([step[name] for step in steps]).cpu().numpy() for name in STACKED}
    shared = {name: np.array([step[name] for step in steps], np.float32) for name in SCALARS}
    indices = np.array([step["steps"] for step in steps], np.int64)
    for row in range(len(final)):
        yield Trajectory(**{name: values[:, row] for name, values in stacked.items()}, **shared, steps=indices)


def image_generator(seed: int, index: int) -> torch.Generator:
    """Return the generator of an image's initial noise and of the noise of its steps; always on the CPU."""
    (own,) = sample_seeds(seed, np.array([index]))
    return torch.Generator().manual_seed(int(own) >> 1)
