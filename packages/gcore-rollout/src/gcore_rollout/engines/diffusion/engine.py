"""The engine of images: it runs an unmodified pipeline of diffusers, and records log-probabilities of its steps."""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from gcore_rollout.engines.diffusion.arrays import in_dtype
from gcore_rollout.engines.diffusion.calls import image_conditions, same_conditions, timestep_map
from gcore_rollout.engines.diffusion.kernels import FlowODE
from gcore_rollout.engines.diffusion.pipeline_call import PipelineCall
from gcore_rollout.engines.diffusion.recording import (
    Recorded,
    StepAbortedError,
    Tape,
    load_pipeline,
)
from gcore_rollout.engines.diffusion.text_encoders import host_text_encoders
from gcore_rollout.engines.diffusion.types import (
    Conditions,
    ImageRequest,
    ImageSample,
    ImageSampling,
)
from gcore_rollout.engines.host_weights import HostWeights
from gcore_rollout.engines.queueing import (
    Control,
    QueuedSample,
    QueueingEngine,
    SampleFilter,
    sample_seeds,
)
from gcore_rollout.errors import EngineModelError, RequestError, RolloutError
from gcore_rollout.weight_sync.digests import HeldWeights, digest_held_tensor
from gcore_rollout.weight_sync.layout import check_shapes

_Image = QueuedSample[ImageRequest, ImageSample]

_MOST_GRAPHS = 64
"""Graphs of a block's code; of more, torch.compile gives up without an error."""
_PROBED = (1, 2)
"""Sizes of two batches that show which of the model's arguments have a row for each image."""
_PROBED_SIZE = (64, 64)
"""Size of the images in their prompts; some pipelines take none that are smaller."""
_PROBED_STEPS = 2
"""Steps of these batches: the timestep of a second one shows what the first leaves open."""


class DiffusersEngine(QueueingEngine[ImageRequest, ImageSample]):
    """Makes images by a pipeline, in batches, in a thread; made by `from_pretrained`, and bound to one event loop.

    The requests of a batch have equal settings, except windows, and one with images in the prompt is a batch of its
    own; the images of a batch start together and end together. An image depends on its seed alone, up to rounding in
    batches of different sizes. `stats` counts prompts, and denoising steps summed over images.

    The methods `pause`, `update_weights` and `sleep` wait for the running batch; `abort` ends it between two steps if
    none of its images is wanted any more. Aborted images start again if they are requested again.

    Args:
        pipeline: a pipeline of diffusers; its scheduler is replaced, and its safety checker is left out.
        max_num_images: largest batch.
        options: further arguments of the pipeline's call, such as max_sequence_length or num_frames.
        size: height and width in pixels of the images that it is tried on; None: the pipeline's own.
        component: name of the transformer that is trained, where the pipeline has two; see `Recorded`.
        device: that it works on; None: the one that the pipeline is on.
        compiles: whether the blocks of the denoiser are compiled, which takes a minute or more.
        offload_text_encoders: whether the text encoders are on the device only while prompts are encoded.

    Attributes:
        pipeline: The pipeline.

    Raises:
        EngineModelError: its scheduler has no log-probability, or the pipeline makes something unknown of its
            model's output.

    Example:
        >>> from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
        >>> model = DiTTransformer2DModel(2, 8, out_channels=4, num_layers=1, sample_size=8)
        >>> pipeline = DiTPipeline(model, AutoencoderKL(block_out_channels=(32,)), DDIMScheduler(clip_sample=False))
        >>> engine = DiffusersEngine(pipeline)
        >>> sampling = ImageSampling(num_inference_steps=4, kernel=DDIM())
        >>> request = ImageRequest(request_id="a", prompt="7", sampling=sampling)
        >>> async def main() -> list[tuple[int, ...]]:
        ...     return [sample.image.shape async for sample in engine.generate([request])]
        >>> asyncio.run(main())
        [(8, 8, 3)]
    """

    _HOW_TO_OPEN = "make a new one"

    def __init__(
        self,
        pipeline: Any,
        *,
        max_num_images: int = 64,
        options: Mapping[str, Any] | None = None,
        size: tuple[int, int] | None = None,
        component: str = "",
        device: str | None = None,
        compiles: bool = False,
        offload_text_encoders: bool = False,
    ) -> None:
        if max_num_images < 1:
            raise RolloutError(f"max_num_images is {max_num_images}; expected at least 1")
        super().__init__(max_num_seqs=max_num_images)
        pipeline.set_progress_bar_config(disable=True)
        if getattr(pipeline, "safety_checker", None) is not None:
            # It makes images black, whose rewards would say nothing of the policy.
            pipeline.safety_checker = None
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):
                part.eval().requires_grad_(False)
        vae: Any = getattr(pipeline, "vae", None)
        if hasattr(vae, "enable_slicing"):
            vae.enable_slicing()
        self._recorded = Recorded(pipeline, component)
        self.pipeline = pipeline
        self._device: torch.device = pipeline.device if device is None else torch.device(device)
        hosted: list[torch.nn.Module] = []
        if offload_text_encoders:
            hosted = host_text_encoders(pipeline, self._device)
        parts: list[torch.nn.Module] = []
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module) and part not in hosted:
                part.to(self._device)
                parts.append(part)
        self._hosted = HostWeights(parts, self._device)
        if compiles:
            _compile_blocks(self._recorded.denoiser)
        self._dtype = next(self._recorded.denoiser.parameters()).dtype
        self._call = PipelineCall(pipeline, self._recorded.denoiser, options or {})
        self._running: tuple[Tape, list[_Image]] | None = None
        self._turn = asyncio.Lock()
        """Held by the running batch, and by methods that change the model."""
        self._per_image: dict[int, set[str]] = {}
        """By number of images in the prompt, which of the model's arguments have a row for each image that is made."""
        self._needs_image = False
        try:
            self._timestep_map = self._probe(0, size)
        except EngineModelError:
            if not self._call.takes_images:
                raise
            self._timestep_map = self._probe(1, size)
            self._needs_image = True

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, device: str = "cpu", dtype: str = "float32", **settings: Any
    ) -> Self:
        """Load a local folder with `load_pipeline`, with weights of ``dtype``: float32, bfloat16 or float16.

        The ``settings`` are further arguments of the class.
        """
        return cls(load_pipeline(path, dtype=getattr(torch, dtype)), device=device, **settings)

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None:
        """Replace the weights of the denoiser alone, under the names that diffusers has for them."""
        async with self._controlling():
            self._check_update(version)
            state = self._recorded.denoiser.state_dict(keep_vars=True)
            new = dict(weights)
            shapes = {
                name: tuple(p.shape) for name, p in self._recorded.denoiser.named_parameters()
            }
            check_shapes(shapes, new, optional=frozenset(state.keys() - shapes.keys()))
            with torch.no_grad():
                for name, tensor in new.items():
                    state[name].copy_(tensor)
            self._has_taken(version)

    async def held_weights(self, names: Sequence[str] | None = None) -> HeldWeights:
        self._check_open()
        parameters: dict[str, torch.Tensor] = dict(self._recorded.denoiser.named_parameters())
        if names is None:
            names = list(parameters)
        tensors = [digest_held_tensor(name, parameters[name].detach) for name in names]
        return HeldWeights(version=self._version, tensors=tensors)

    async def close(self) -> None:
        if not self._is_closed:
            await self.abort()
        self._is_closed = True
        if self._driver is not None:
            self._driver.cancel()
            with suppress(asyncio.CancelledError):
                await self._driver

    @asynccontextmanager
    async def _controlling(self) -> AsyncGenerator[None]:
        self._check_open()
        async with self._turn:
            yield

    async def _control(self, name: Control) -> None:
        if name in ("sleep", "discard") and self._device.type != "cpu":
            self._hosted.offload(self._version)
            # Other processes on the device need it.
            torch.accelerator.empty_cache()
        elif name in ("wake", "wake_weights"):
            self._hosted.onload()

    def _num_running(self) -> int:
        if self._running is None:
            return 0
        return len(self._running[1])

    def _remove_running(
        self, which: SampleFilter[ImageRequest, ImageSample], *, as_aborted: bool
    ) -> list[_Image]:
        """End the batch if none of its images is wanted any more; its images then come as aborted."""
        del as_aborted
        if self._running is not None:
            tape, batch = self._running
            tape.is_aborted |= all(which(image) or image.call.abandoned for image in batch)
        return []

    def _check_request(self, request: ImageRequest) -> None:
        self._call.check(request)
        if not isinstance(request.sampling.kernel, FlowODE):
            self._recorded.kernel(request.sampling.kernel)
        if self._needs_image and not request.images:
            raise RequestError(
                f"images is empty; expected an image, because {self._call.kind} makes none of a text alone"
            )

    async def _drive(self) -> None:
        while self._waiting and not (self._is_paused or self._is_asleep):
            async with self._turn:
                if self._waiting and not (self._is_paused or self._is_asleep):
                    await self._make(self._next_batch())

    def _next_batch(self) -> list[_Image]:
        """Take the first waiting image and the ones that can be batched with it."""
        first = self._waiting[0].request
        batch = [image for image in self._waiting if image.request.fits(first)][
            : self._max_num_seqs
        ]
        self._remove_waiting(batch.__contains__)
        return batch

    async def _make(self, batch: list[_Image]) -> None:
        sampling = batch[0].request.sampling
        generators = [image_generator(image.request.seed, image.index) for image in batch]
        starts = generators
        if sampling.shared_noise:
            starts = [image_generator(image.request.seed, 0) for image in batch]
            # The first image's own generator would repeat the initial noise in its first step.
            generators = [image_generator(image.request.seed, image.index + 1) for image in batch]
        with self._recorded.taping([image.request.sampling for image in batch], generators) as tape:
            self._running = tape, batch
            version = self._version
            requests = [image.request for image in batch]
            thread = asyncio.create_task(asyncio.to_thread(self._probe_and_call, requests, starts))
            try:
                pixels = await asyncio.shield(thread)
                self._hand_over(batch, tape, pixels, version)
            except asyncio.CancelledError:
                tape.is_aborted = True
                await asyncio.wait([thread])
                # asyncio would report an error that is never asked for.
                thread.exception()
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

    def _hand_over(
        self, batch: list[_Image], tape: Tape, pixels: NDArray[np.uint8], version: int
    ) -> None:
        """Hand over a batch of B images with pixels [B, ...]."""
        assert tape.form is not None
        assert tape.final is not None
        negative = batch[0].request.sampling.negative_prompt
        if negative and tape.form.guidance_scale is None:
            raise RequestError(
                f"negative_prompt is {negative!r}; expected '', because {self._call.kind} calls its model only "
                "with the prompt"
            )
        final = tape.final.cpu().numpy()
        form = tape.form
        with_prompt, shared = self._split(tape, len(batch[0].request.images))
        without: Sequence[Conditions | None] = [None] * len(batch)
        if form.guidance_scale is not None:
            with_prompt, without = form.halves(with_prompt, len(batch))
        for row, (image, trajectory) in enumerate(zip(batch, tape.trajectories(), strict=True)):
            sample = ImageSample(
                request_id=image.request.request_id,
                index=image.index,
                image=pixels[row],
                latents=final[row],
                trajectory=in_dtype(trajectory, self._dtype),
                conditions=with_prompt[row],
                negative_conditions=without[row],
                shared_conditions=shared,
                guidance_scale=form.guidance_scale,
                keeps_norm=form.keeps_norm,
                is_negated=form.is_negated,
                timestep_map=self._timestep_map,
                weight_version=version,
                finish_reason="stop",
            )
            image.call.finished.put_nowait(sample)

    def _split(self, tape: Tape, num_images: int) -> tuple[list[Conditions], Conditions]:
        """Return the conditions of each row of a step's calls, and those that all share."""
        per_image = self._per_image[num_images]
        common = {
            name: value for name, value in tape.conditions[0].items() if name not in per_image
        }
        for conditions in tape.conditions[1:]:
            of_call = {name: value for name, value in conditions.items() if name not in per_image}
            if not same_conditions(common, of_call):
                raise EngineModelError(
                    f"the pipeline's two calls of its model have other {sorted(common)}; expected the same in both"
                )
        rows, shared = image_conditions(tape.conditions[0], per_image)
        for conditions in tape.conditions[1:]:
            rows += image_conditions(conditions, per_image)[0]
        return rows, shared

    def _probe_and_call(
        self, requests: Sequence[ImageRequest], generators: Sequence[torch.Generator]
    ) -> NDArray[np.uint8]:
        """Run the pipeline as `_call`, after it was tried with so many images in the prompt."""
        if len(requests[0].images) not in self._per_image:
            self._probe(len(requests[0].images), requests[0].sampling.size)
        return self._call(requests, generators)

    def _probe(self, num_images: int, size: tuple[int, int] | None) -> tuple[float, float] | None:
        """Make two batches of prompts with so many images, and return the timestep map.

        It notes which of the model's arguments have a row for each image that is made.
        """
        has_rows: dict[str, bool] = {}
        prompts = ("probe", "another probe")
        if not self._call.takes_text:
            prompts = ("0", "0")
        elif num_images:
            prompts = ("probe", "probe")
        grey = (np.full((*_PROBED_SIZE, 3), 128, np.uint8),) * num_images
        sampling = ImageSampling(num_inference_steps=_PROBED_STEPS, size=size)
        requests = [
            ImageRequest(request_id="probe", prompt=p, images=grey, sampling=sampling)
            for p in prompts
        ]
        times: list[tuple[float, float]] = []
        for count in _PROBED:
            generators = [image_generator(0, i) for i in range(count)]
            with self._recorded.taping([sampling] * count, generators) as tape:
                try:
                    self._call(requests[:count], generators)
                except (
                    AttributeError,
                    IndexError,
                    NameError,
                    RuntimeError,
                    TypeError,
                    ValueError,
                ) as error:
                    if isinstance(error, RolloutError | torch.OutOfMemoryError):
                        raise
                    images = "alone"
                    if num_images:
                        images = f"and {num_images} image{'s' * (num_images > 1)}"
                    settings = f"size {size}"
                    if self._call.options:
                        settings += f" and {self._call.options}"
                    raise EngineModelError(
                        f"{self._call.kind} makes no image of a prompt {images} with {settings}: "
                        f"{' '.join(str(error).split())}"
                    ) from error
            if not tape.conditions:
                raise EngineModelError("the pipeline makes no step: its model was never called")
            for name, value in tape.conditions[0].items():
                is_long = isinstance(value, list) or (
                    isinstance(value, torch.Tensor) and value.ndim > 0
                )
                # Masks, which some pipelines only pass for prompts of several lengths, are in one batch alone.
                has_rows[name] = has_rows.get(name, True) and is_long and len(value) == count
            times = tape.times
        self._per_image[num_images] = {name for name, has in has_rows.items() if has}
        return timestep_map(times, self._recorded.num_train_timesteps)


def image_generator(seed: int, index: int) -> torch.Generator:
    """Return the generator of an image's initial noise and of the noise of its steps; always on the CPU."""
    image_seed = int(sample_seeds(seed, np.array([index]))[0])
    return torch.Generator().manual_seed(image_seed >> 1)


def _compile_blocks(denoiser: torch.nn.Module) -> None:
    """Compile the blocks of a model of diffusers, with batch and lengths as variables, at their first calls.

    Raises:
        RolloutError: the model is on CPU, and there is no C++ compiler, which Inductor needs.
    """
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if next(denoiser.parameters()).device.type == "cpu" and not any(map(shutil.which, compilers)):
        raise RolloutError("compile is True; expected a C++ compiler on CPU, such as g++")
    dynamo: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
    dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
    for part in denoiser.children():
        if isinstance(part, torch.nn.ModuleList):
            for block in part:
                block.forward = torch.compile(block.forward, dynamic=True)
