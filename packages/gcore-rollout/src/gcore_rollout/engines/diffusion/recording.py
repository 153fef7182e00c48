"""Records the steps of an unmodified pipeline: its scheduler draws by our kernels, and its model's calls are recorded.

The scheduler is replaced by one of the same class whose ``step`` is a `Tape`'s, and hooks run before and after the
denoiser.
"""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from gcore_rollout.engines.diffusion.calls import AnswerForm, ModelCall, same_conditions
from gcore_rollout.engines.diffusion.kernels import DDIM, FlowODE, Kernel
from gcore_rollout.engines.diffusion.types import SCALARS, STACKED, ImageSampling, Trajectory
from gcore_rollout.errors import EngineModelError, RequestError, make_extra_error

try:
    import diffusers
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )
    from diffusers.utils import logging
except ImportError:
    raise make_extra_error("diffusers", "diffusion") from None


_DENOISERS = ("transformer", "transformer_2", "unet")
"""Names that pipelines have for the models that are called at their steps."""
_WEIGHTS = re.compile(
    r"(diffusion_pytorch_model|pytorch_model|model)(-\d+-of-\d+)?(\.(?P<variant>\w+?))?(-\d+-of-\d+)?\.(safetensors|bin)"
)
"""Names of weight files in the folder of a model."""


class StepAbortedError(Exception):
    """The batch was aborted."""


class Tape:
    """Makes one batch's steps and records them; a step removes the model's ``calls`` since the last one.

    Each image has a generator, from which noise is drawn after the first latents, and settings of its own, which differ
    in their windows alone. Steps inside of an image's window are made by ``kernel``, the others by ``plain``.
    """

    def __init__(
        self,
        samplings: Sequence[ImageSampling],
        generators: Sequence[torch.Generator],
        *,
        kernel: Kernel,
        plain: Kernel,
        calls: list[ModelCall],
    ) -> None:
        self._samplings = samplings
        self._generators = generators
        self._kernel = kernel
        self._plain = plain
        self._calls = calls
        self._num_steps = 0
        self.is_aborted = False
        """Set from outside: the next step raises `StepAbortedError`."""
        self.steps: list[dict[str, Any]] = []
        """The recorded steps, by the fields of a `Trajectory`, of the images in ``rows``."""
        self.conditions: list[dict[str, Any]] = []
        """The model's conditions in the calls of a step; the same in all steps."""
        self.form: AnswerForm | None = None
        """How a step's outputs make up the scheduler's input; the same in all steps."""
        self.times: list[tuple[float, float]] = []
        """The timesteps of all steps: the scheduler's, and the model's."""
        self.final: torch.Tensor | None = None
        """Latents [B, ...] after the last step, float32."""

    def step(
        self,
        output: torch.Tensor,
        latents: torch.Tensor,
        level: torch.Tensor,
        next_level: torch.Tensor,
        *,
        time: float,
    ) -> torch.Tensor:
        """Make a step, and return the next latents in the data type of the model's output.

        ``time`` is the level's timestep in training.
        """
        if self.is_aborted:
            raise StepAbortedError
        if len(latents) != len(self._generators):
            raise EngineModelError(
                f"the pipeline steps {len(latents)} latents for {len(self._generators)} images; expected one each "
                "(guidance within the latents, as in DiTPipeline, needs guidance_scale=1)"
            )
        call = self._take_calls(output, latents)
        timestep = call.timestep
        self.times.append((time, timestep))
        index = self._num_steps
        self._num_steps += 1
        rows: list[int] = []
        for row, sampling in enumerate(self._samplings):
            first, end = sampling.window or (0, sampling.num_inference_steps)
            if first <= index < end:
                rows.append(row)
        all_outputs = output.float()
        all_latents = latents.float()
        # Without an index all rows stay where they are.
        inside = slice(None) if len(rows) == len(latents) else rows
        following = (
            self._plain(all_outputs, all_latents, level, next_level).mean.to(output.dtype).float()
        )
        if rows:
            x = all_latents[inside]
            transition = self._kernel(all_outputs[inside], x, level, next_level)
            has_noise = bool((transition.std > 0).all())
            drawn = transition.mean
            if has_noise:
                drawn = transition.mean + transition.std * self._draw_noise(x, rows)
            # What the model sees next is what has a density.
            drawn = drawn.to(output.dtype).float()
            if has_noise or self._samplings[0].window is not None:
                if not call.is_of_trained:
                    sampling = self._samplings[rows[0]]
                    raise EngineModelError(
                        f"window is {sampling.window} and step {index} is not made by the model that is trained; "
                        f"expected a window of its steps among {sampling.num_inference_steps}"
                    )
                self.steps.append(
                    {
                        "rows": rows,
                        "latents": x,
                        "next_latents": drawn,
                        "means": transition.mean,
                        "log_probs": transition.log_prob(drawn)
                        if has_noise
                        else torch.full((len(x),), torch.nan),
                        "steps": index,
                        "levels": float(level),
                        "next_levels": float(next_level),
                        "timesteps": timestep,
                    }
                )
            following[inside] = drawn
        self.final = following
        return following.to(output.dtype)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yield the trajectory of each image, after the last step."""
        assert self.final is not None
        # The values of each field at each step, for each image.
        values_by_image = [defaultdict[str, list[Any]](list) for _ in range(len(self.final))]
        for step in self.steps:
            stacked = {name: step[name].cpu().numpy() for name in STACKED}
            for index, row in enumerate(step["rows"]):
                values = values_by_image[row]
                for name in STACKED:
                    values[name].append(stacked[name][index])
                for name in (*SCALARS, "steps"):
                    values[name].append(step[name])
        shapes = dict.fromkeys(STACKED, tuple(self.final.shape[1:])) | {"log_probs": ()}
        for values in values_by_image:
            steps = np.array(values["steps"], np.int64)
            arrays = {name: np.array(values[name], np.float32) for name in STACKED + SCALARS}
            for name, shape in shapes.items():
                arrays[name] = arrays[name].reshape(len(steps), *shape)
            yield Trajectory(**arrays, steps=steps)

    def _take_calls(self, scheduler_input: torch.Tensor, latents: torch.Tensor) -> ModelCall:
        """Take the calls of this step, which made the scheduler's input, and return the first."""
        calls = list(self._calls)
        self._calls.clear()
        if len(calls) not in (1, 2):
            raise EngineModelError(
                f"the pipeline calls its model {len(calls)} times a step; expected once or twice"
            )
        conditions = [call.conditions(latents) for call in calls]
        if self.form is None:
            self.form = AnswerForm.find(calls, scheduler_input, self._samplings[0].guidance_scale)
            self.conditions = conditions
        elif not (
            len(calls) == len(self.conditions)
            and all(map(same_conditions, conditions, self.conditions))
            and self.form.holds(calls, scheduler_input)
        ):
            raise EngineModelError(
                "the pipeline calls its model otherwise in later steps than in the first; expected the same conditions "
                "and guidance in all steps"
            )
        return calls[0]

    def _draw_noise(self, like: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Draw noise [R, ...] for the images in ``rows`` alone."""
        noise: list[torch.Tensor] = []
        for row in rows:
            generator = self._generators[row]
            noise.append(
                torch.randn(
                    like.shape[1:],
                    generator=generator,
                    device=generator.device,
                    dtype=torch.float32,
                )
            )
        return torch.stack(noise).to(like.device)


class _FlowScheduler(FlowMatchEulerDiscreteScheduler):
    tape: Tape | None = None

    def step(self, model_output: Any, timestep: Any, sample: Any, *_: Any, **__: Any) -> Any:
        assert self.tape is not None
        if self.step_index is None:
            self._init_step_index(timestep)
        sigmas = cast(torch.Tensor, self.sigmas)
        index = self._step_index
        level = sigmas[index]
        time = float(level) * cast(Any, self.config).num_train_timesteps
        following = self.tape.step(model_output, sample, level, sigmas[index + 1], time=time)
        self._step_index = index + 1
        return _Stepped(following)


class _DDIMScheduler(DDIMScheduler):
    tape: Tape | None = None

    def step(self, model_output: Any, timestep: Any, sample: Any, *_: Any, **__: Any) -> Any:
        assert self.tape is not None
        config: Any = self.config
        before = timestep - config.num_train_timesteps // self.num_inference_steps
        level = self.alphas_cumprod[timestep]
        next_level = self.alphas_cumprod[before] if before >= 0 else self.final_alpha_cumprod
        following = self.tape.step(model_output, sample, level, next_level, time=float(timestep))
        return _Stepped(following)


class _Stepped(NamedTuple):
    """An output of diffusers, which is a tuple with names."""

    prev_sample: torch.Tensor


class Recorded:
    """A pipeline whose steps are made by a `Tape`.

    Args:
        pipeline: a pipeline of diffusers with a flow-matching Euler or a DDIM scheduler, which is replaced.
        component: name of the denoiser that is trained, where the pipeline has one for the first and one for the last
            steps; empty: it has one.

    Raises:
        EngineModelError: another scheduler, one with settings that have no log-probability, or no known model.

    Attributes:
        denoiser: The model that is called at every step, or at those that are trained.
        is_flow: True for a flow-matching model; otherwise one of DDPM's kind.
    """

    def __init__(self, pipeline: Any, component: str = "") -> None:
        self.pipeline = pipeline
        pipeline.scheduler = self._scheduler = _make_recording_scheduler(pipeline.scheduler)
        models: dict[str, torch.nn.Module] = {}
        for name in _DENOISERS:
            model = getattr(pipeline, name, None)
            if isinstance(model, torch.nn.Module):
                models[name] = model
        class_name = type(pipeline).__name__
        if not models:
            raise EngineModelError(f"{class_name} has no model; expected a transformer or a unet")
        if not component and len(models) == 1:
            component = next(iter(models))
        if component not in models:
            names = " or ".join(models)
            raise EngineModelError(
                f"component is {component!r}; expected {names}, which {class_name} has"
            )
        self.denoiser = denoiser = models[component]
        self.num_train_timesteps: int = self._scheduler.config.num_train_timesteps
        self.is_flow = isinstance(self._scheduler, _FlowScheduler)
        self._parameters = list(inspect.signature(denoiser.forward).parameters)
        self._calls: list[ModelCall] = []
        self._arguments: dict[str, Any] = {}
        for model in models.values():
            model.register_forward_pre_hook(self._note_arguments, with_kwargs=True)
            model.register_forward_hook(self._note_output)

    def kernel(self, kernel: Kernel) -> Kernel:
        """Return a kernel with the scheduler's own settings; a `RequestError` if it is not for this kind of model."""
        if self.is_flow == isinstance(kernel, DDIM):
            expected = "DDIM, because the model is of DDPM's kind"
            if self.is_flow:
                expected = "a flow kernel, because the model is of flow matching"
            raise RequestError(f"kernel is {type(kernel).__name__}; expected {expected}")
        return adapt_kernel(kernel, self._scheduler)

    @contextmanager
    def taping(
        self, samplings: Sequence[ImageSampling], generators: Sequence[torch.Generator]
    ) -> Generator[Tape]:
        """Record the one call of the pipeline that is made inside the block, for images with these settings.

        Blocks inside it record their own.
        """
        # The default kernel is a flow's; without noise each kind of model has its own.
        plain = self.kernel(FlowODE() if self.is_flow else DDIM(eta=0.0))
        kernel = plain
        if not isinstance(samplings[0].kernel, FlowODE):
            kernel = self.kernel(samplings[0].kernel)
        tape = Tape(samplings, generators, kernel=kernel, plain=plain, calls=self._calls)
        self._calls.clear()
        outer = self._scheduler.tape
        self._scheduler.tape = tape
        try:
            yield tape
        finally:
            self._scheduler.tape = outer

    def _note_arguments(
        self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._arguments = dict(zip(self._parameters, args, strict=False)) | kwargs

    def _note_output(self, model: torch.nn.Module, _: tuple[Any, ...], output: Any) -> None:
        call = ModelCall(
            arguments=self._arguments,
            latents_argument=self._parameters[0],
            output=output[0],
            is_of_trained=model is self.denoiser,
        )
        self._calls.append(call)


def adapt_kernel(kernel: Kernel, scheduler: Any) -> Kernel:
    """Return a kernel with the settings of a scheduler of diffusers, as engines and training must use it."""
    if not isinstance(kernel, DDIM):
        return kernel
    config = scheduler.config
    clip = config.clip_sample_range if config.clip_sample else None
    return replace(kernel, prediction_type=config.prediction_type, clip_sample_range=clip)


def weight_variant(folder: str | Path) -> str | None:
    """Return the variant of a model's folder, such as fp16, if it has no weights without one; None: it has some."""
    variants: set[str | None] = set()
    for file in Path(folder).iterdir():
        match = _WEIGHTS.fullmatch(file.name)
        if match:
            variants.add(match["variant"])
    if None in variants:
        return None
    return min(filter(None, variants), default=None)


def load_pipeline(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a local pipeline folder; optional components that it lacks, such as a VAE, are None.

    Weights of a variant, such as fp16, are loaded if a component has no others.

    Raises:
        EngineModelError: it is not the folder of a pipeline that diffusers knows, or its weights lack tensors.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise EngineModelError(
            f"{path} has no model_index.json; expected the folder of a pipeline of diffusers"
        )
    components = json.loads(index.read_text())
    name = components.get("_class_name")
    pipeline_class = getattr(diffusers, name or "", None)
    if pipeline_class is None:
        raise EngineModelError(f"class of {index} is {name!r}; expected a pipeline of diffusers")
    absent = {
        name: None
        for name, entry in components.items()
        if isinstance(entry, list) and entry[0] is None
    }
    by_folder = [weight_variant(folder) for folder in Path(path).iterdir() if folder.is_dir()]
    variants = sorted({variant for variant in by_folder if variant is not None})
    if len(variants) > 1:
        raise EngineModelError(f"{path} has weights of the variants {variants}; expected one")
    variant = next(iter(variants), None)
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        pipeline = pipeline_class.from_pretrained(
            path, dtype=dtype, local_files_only=True, variant=variant, **absent
        )
    except (OSError, ValueError, KeyError) as error:
        raise EngineModelError(f"{path} does not load: {error}") from error
    finally:
        if has_bar:
            logging.enable_progress_bar()
    for name, component in pipeline.components.items():
        if not isinstance(component, torch.nn.Module):
            continue
        # diffusers leaves on the meta device what the files lack.
        missing = [
            tensor for tensor, parameter in component.named_parameters() if parameter.is_meta
        ]
        if missing:
            raise EngineModelError(
                f"the weights in {Path(path) / name} lack {len(missing)} of the model's tensors, such as {missing[0]}"
            )
    return pipeline


def _make_recording_scheduler(scheduler: Any) -> Any:
    classes: dict[type, type] = {
        FlowMatchEulerDiscreteScheduler: _FlowScheduler,
        DDIMScheduler: _DDIMScheduler,
    }
    for plain, recording in classes.items():
        if type(scheduler) in (plain, recording):
            for name in ("stochastic_sampling", "thresholding", "invert_sigmas"):
                if scheduler.config.get(name):
                    raise EngineModelError(
                        f"the scheduler has {name}: its steps have no log-probability then"
                    )
            return recording.from_config(scheduler.config)
    raise EngineModelError(
        f"the pipeline's scheduler is {type(scheduler).__name__}, whose steps have no log-probability; expected "
        f"{_advised_scheduler(scheduler)}, saved in the pipeline's folder"
    )


def _advised_scheduler(scheduler: Any) -> str:
    """Return the scheduler that samples a model of another one, as code."""
    config = scheduler.config
    is_flow = type(scheduler).__name__.startswith("FlowMatch")
    if (
        is_flow
        or config.get("use_flow_sigmas")
        or config.get("prediction_type") == "flow_prediction"
    ):
        shift = config.get("shift", config.get("flow_shift", 1.0))
        return f"FlowMatchEulerDiscreteScheduler(shift={shift})"
    return "DDIMScheduler.from_config(pipeline.scheduler.config)"
