"""What a pipeline does, seen from outside: its scheduler draws by our kernels, and its model's calls are noted.

The pipeline itself is diffusers' own, whichever it is. Its scheduler is replaced by one of the same class whose
``step`` is a `Tape`'s, and a hook stands before and behind its denoiser.
"""

import inspect
import json
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from gcore_rollout.engines.diffusion.kernels import DDIM, FlowODE, Kernel
from gcore_rollout.engines.diffusion.types import ImageSampling
from gcore_rollout.errors import MissingExtraError, RequestError, UnsupportedModelError

try:
    import diffusers
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
    from diffusers.utils import logging
except ImportError:
    raise MissingExtraError("diffusers", "diffusion") from None

_TOLERANCE = 1e-5
"""Relative, of what a pipeline is found to make of its model's output."""


class StepAbortedError(Exception):
    """Nobody waits for the images any more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One step of a batch of B images."""

    index: int
    latents: torch.Tensor
    """[B, ...], float32, as are the others."""
    next_latents: torch.Tensor
    mean: torch.Tensor
    log_prob: torch.Tensor
    """[B]; NaN where there is no noise."""
    level: float
    next_level: float
    timestep: float
    """As the model is told it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCall:
    """What a denoiser was told, and what it said."""

    arguments: dict[str, Any]
    """By its own names for them."""
    output: torch.Tensor


class Tape:
    """Makes one batch's steps and records them.

    Args:
        sampling: how.
        generators: one for each image; whoever drew the first latents from it, the noise comes behind them.
        plain: the kernel of steps without noise.
        calls: of the model; those since the last step are taken out.
    """

    def __init__(
        self, sampling: ImageSampling, generators: Sequence[torch.Generator], *, plain: Kernel, calls: list[ModelCall]
    ) -> None:
        self._sampling = sampling
        self._generators = generators
        self._plain = plain
        self._calls = calls
        self._num_steps = 0
        self.is_aborted = False
        """Set from outside: the next step raises `StepAbortedError`."""
        self.steps: list[Step] = []
        self.call: ModelCall | None = None
        """The first step's."""
        self.final: torch.Tensor | None = None
        """[B, ...] the last step's latents, float32."""

    def step(
        self, output: torch.Tensor, latents: torch.Tensor, level: torch.Tensor, next_level: torch.Tensor
    ) -> torch.Tensor:
        """The next latents, in the type of the model's output."""
        if self.is_aborted:
            raise StepAbortedError
        if len(latents) != len(self._generators):
            raise UnsupportedModelError(
                f"the pipeline steps {len(latents)} latents for {len(self._generators)} images: one each is needed "
                "(guidance within the latents, as in DiTPipeline, needs guidance_scale=1)"
            )
        call = self._only_call(output)
        index, self._num_steps = self._num_steps, self._num_steps + 1
        first, end = self._sampling.window or (0, self._sampling.num_inference_steps)
        is_inside = first <= index < end
        kernel = self._sampling.kernel if is_inside else self._plain
        x = latents.float()
        mean, std = transition = kernel(output.float(), x, level, next_level)
        has_noise = bool((std > 0).all())
        drawn = mean + std * self._noise(x) if has_noise else mean
        # What the model sees next is what has a density.
        following = drawn.to(output.dtype).float()
        if has_noise or (is_inside and self._sampling.window is not None):
            self.steps.append(
                Step(
                    index=index,
                    latents=x,
                    next_latents=following,
                    mean=mean,
                    log_prob=transition.log_prob(following) if has_noise else torch.full((len(x),), torch.nan),
                    level=float(level),
                    next_level=float(next_level),
                    timestep=_timestep_of(call),
                )
            )
        self.final = following
        return following.to(output.dtype)

    def _only_call(self, output: torch.Tensor) -> ModelCall:
        calls, self._calls[:] = list(self._calls), []
        if len(calls) != 1:
            raise UnsupportedModelError(
                f"the pipeline asks its model {len(calls)} times a step: once is needed, for what it makes of several "
                "answers cannot be made again in training"
            )
        if self.call is None:
            self.call = calls[0]
            check_combination(calls[0].output, output, self._sampling.guidance_scale)
        return calls[0]

    def _noise(self, like: torch.Tensor) -> torch.Tensor:
        shape = like.shape[1:]
        drawn = [torch.randn(shape, generator=g, device=g.device, dtype=torch.float32) for g in self._generators]
        return torch.stack(drawn).to(like.device)


def combined(output: torch.Tensor, num_images: int, num_channels: int, guidance_scale: float) -> torch.Tensor:
    """What a pipeline gives its scheduler of its model's output.

    Channels behind the latents' own are a learned variance, and left out. Where there are twice as many rows as images,
    the first half is without the prompt, and u + guidance_scale (c - u) is taken (arXiv 2207.12598).

    Args:
        output: [num_images or 2 num_images, channels, ...] of the model.
        num_images: rows of the result.
        num_channels: its channels.
        guidance_scale: of classifier-free guidance.
    """
    output = output[:, :num_channels]
    if len(output) != 2 * num_images:
        return output
    without, with_prompt = output.chunk(2)
    return without + guidance_scale * (with_prompt - without)


def check_combination(output: torch.Tensor, given: torch.Tensor, guidance_scale: float) -> None:
    """
    Raises:
        UnsupportedModelError: the pipeline makes something else of its model's output than `combined`.
    """
    own = combined(output, len(given), given.shape[1], guidance_scale)
    if own.shape != given.shape or not torch.allclose(own.float(), given.float(), rtol=_TOLERANCE, atol=_TOLERANCE):
        raise UnsupportedModelError(
            f"the pipeline makes something unknown of its model's output of shape {tuple(output.shape)}, and gives "
            f"its scheduler {tuple(given.shape)}: the output itself, or u + guidance_scale (c - u) of its halves, is "
            "needed, for training makes it again"
        )


class _FlowScheduler(FlowMatchEulerDiscreteScheduler):
    tape: Tape | None = None

    def step(self, model_output: Any, timestep: Any, sample: Any, *_: Any, return_dict: bool = True, **__: Any) -> Any:
        assert self.tape is not None
        if self.step_index is None:
            self._init_step_index(timestep)
        sigmas, index = cast(torch.Tensor, self.sigmas), self._step_index
        following = self.tape.step(model_output, sample, sigmas[index], sigmas[index + 1])
        self._step_index = index + 1
        return _Stepped(following) if return_dict else (following,)


class _DDIMScheduler(DDIMScheduler):
    tape: Tape | None = None

    def step(self, model_output: Any, timestep: Any, sample: Any, *_: Any, return_dict: bool = True, **__: Any) -> Any:
        assert self.tape is not None
        config: Any = self.config
        before = timestep - config.num_train_timesteps // self.num_inference_steps
        level = self.alphas_cumprod[timestep]
        next_level = self.alphas_cumprod[before] if before >= 0 else self.final_alpha_cumprod
        following = self.tape.step(model_output, sample, level, next_level)
        return _Stepped(following) if return_dict else (following,)


class _Stepped(tuple[torch.Tensor]):
    """diffusers' outputs are both tuples and have names."""

    def __new__(cls, following: torch.Tensor) -> "_Stepped":
        return super().__new__(cls, (following,))

    @property
    def prev_sample(self) -> torch.Tensor:
        return self[0]


class Recorded:
    """A pipeline whose steps are ours.

    Args:
        pipeline: one of diffusers, with a flow-matching Euler or a DDIM scheduler, which is replaced.

    Raises:
        UnsupportedModelError: another scheduler, or one with settings that have no log-probability.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline = pipeline
        pipeline.scheduler = self._scheduler = _recording(pipeline.scheduler)
        self.denoiser: torch.nn.Module = denoiser_of(pipeline)
        self._parameters = list(inspect.signature(self.denoiser.forward).parameters)
        self._calls: list[ModelCall] = []
        self._arguments: dict[str, Any] = {}
        self.denoiser.register_forward_pre_hook(self._called, with_kwargs=True)
        self.denoiser.register_forward_hook(self._answered)

    @property
    def is_flow(self) -> bool:
        """Whether it is a flow-matching model; otherwise one of DDPM's kind."""
        return isinstance(self._scheduler, _FlowScheduler)

    @property
    def latents_argument(self) -> str:
        """What the denoiser calls its latents."""
        return self._parameters[0]

    def kernel(self, kernel: Kernel) -> Kernel:
        """A kernel with the scheduler's own settings in it.

        Raises:
            RequestError: it is none for this kind of model.
        """
        if self.is_flow == isinstance(kernel, DDIM):
            kind, needed = ("flow matching", "a flow kernel") if self.is_flow else ("DDPM's kind", "DDIM")
            raise RequestError(f"kernel is {type(kernel).__name__}: the model is of {kind}, {needed} is needed")
        return suited(kernel, self._scheduler)

    @contextmanager
    def taping(self, sampling: ImageSampling, generators: Sequence[torch.Generator]) -> Generator[Tape]:
        """Inside, one call of the pipeline is made with these settings and recorded.

        Raises:
            RequestError: the settings' kernel is none for this model.
        """
        # The default is a flow's; where there is no noise, each kind has its own.
        plain = self.kernel(FlowODE() if self.is_flow else DDIM(eta=0.0))
        kernel = plain if isinstance(sampling.kernel, FlowODE) else self.kernel(sampling.kernel)
        tape = Tape(replace(sampling, kernel=kernel), generators, plain=plain, calls=self._calls)
        self._calls.clear()
        self._scheduler.tape = tape
        try:
            yield tape
        finally:
            self._scheduler.tape = None

    def _called(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = dict(zip(self._parameters, args, strict=False)) | kwargs

    def _answered(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._calls.append(ModelCall(arguments=self._arguments, output=output[0]))


def suited(kernel: Kernel, scheduler: Any) -> Kernel:
    """A kernel with the settings of a scheduler of diffusers in it, as engines draw by it: so training is to, too."""
    if not isinstance(kernel, DDIM):
        return kernel
    config = scheduler.config
    clip = config.clip_sample_range if config.clip_sample else None
    return replace(kernel, prediction_type=config.prediction_type, clip_sample_range=clip)


def load_pipeline(path: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A local pipeline folder; what its pipeline could have and it has not, such as a VAE, is None.

    Args:
        path: has a model_index.json.
        dtype: of the weights.

    Raises:
        UnsupportedModelError: it is no pipeline's folder, one that diffusers does not know, or one whose weights lack
            tensors.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise UnsupportedModelError(f"{path} has no model_index.json: a pipeline's folder of diffusers is needed")
    components = json.loads(index.read_text())
    kind = getattr(diffusers, components.get("_class_name", ""), None)
    if kind is None:
        name = components.get("_class_name")
        raise UnsupportedModelError(f"{index} is of class {name!r}: a pipeline of diffusers is needed")
    absent = {name: None for name, found in components.items() if isinstance(found, list) and found[0] is None}
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        pipeline = kind.from_pretrained(path, dtype=dtype, local_files_only=True, **absent)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{path} does not load: {error}") from error
    finally:
        if has_bar:
            logging.enable_progress_bar()
    for name, component in pipeline.components.items():
        # diffusers leaves on the meta device what the files lack.
        tensors = component.named_parameters() if isinstance(component, torch.nn.Module) else ()
        if missing := [tensor for tensor, parameter in tensors if parameter.is_meta]:
            raise UnsupportedModelError(
                f"the weights in {Path(path) / name} lack {len(missing)} of the model's tensors, such as {missing[0]}"
            )
    return pipeline


def denoiser_of(pipeline: Any) -> torch.nn.Module:
    """The model of a pipeline that is asked at every step.

    Raises:
        UnsupportedModelError: it has none that is known.
    """
    for name in ("transformer", "unet"):
        if isinstance(module := getattr(pipeline, name, None), torch.nn.Module):
            return module
    raise UnsupportedModelError(f"{type(pipeline).__name__} has neither a transformer nor a unet: one is needed")


def _recording(scheduler: Any) -> Any:
    kinds: dict[type, type] = {FlowMatchEulerDiscreteScheduler: _FlowScheduler, DDIMScheduler: _DDIMScheduler}
    for kind, recording in kinds.items():
        if type(scheduler) in (kind, recording):
            unfit = ("stochastic_sampling", "thresholding", "invert_sigmas")
            if found := [name for name in unfit if scheduler.config.get(name)]:
                raise UnsupportedModelError(f"the scheduler has {found[0]}: its steps have no log-probability then")
            return recording.from_config(scheduler.config)
    known = ", ".join(kind.__name__ for kind in kinds)
    raise UnsupportedModelError(
        f"the pipeline's scheduler is {type(scheduler).__name__}, whose steps have no log-probability: one of {known} "
        "is needed"
    )


def _timestep_of(call: ModelCall) -> float:
    value = call.arguments.get("timestep", call.arguments.get("timesteps"))
    if value is None:
        raise UnsupportedModelError(
            f"the pipeline's model is told {sorted(call.arguments)}: a timestep among them is needed"
        )
    return float(value.reshape(-1)[0]) if isinstance(value, torch.Tensor) else float(value)
