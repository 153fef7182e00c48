"""Simulated language models: the work, lengths and names of responses, drawn or replayed, and drawn prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_placement import (
    SampledLengths,
    TransformerWorkload,
    blend,
    log_normal,
    uniform,
)
from gcore_rollout import Completion, Prompt, Request
from gcore_runs.errors import UserError
from gcore_runs.inputs import model_folder
from gcore_runs.simulation.config import LengthModel, SimConfig
from gcore_runs.simulation.services import SimulatedModality, group_and_index, sample_name
from gcore_trainer import Sample

_TRAIN_PROMPT_STREAM = 1
_LENGTH_STREAM = 2
_PROMPT_STREAM = 6
_NUM_PROMPTS = 10_000

_BUILT_IN = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152_064,
}
"""The shape of Qwen2.5-7B (arXiv 2412.15115, table 1, and its config.json)."""


@dataclass(frozen=True, kw_only=True)
class CoarseWorkload(TransformerWorkload):
    """The work of sequences whose entries stand for ``token_unit`` tokens each.

    For L entries the linear term is exact. The attention term has u^2 L (L + 1) / 2 pairs, u = token_unit, where the
    tokens have u L (u L + 1) / 2: more by a share of nearly 1 / L.
    """

    token_unit: int

    @property
    def flops_per_token(self) -> float:
        return super().flops_per_token * self.token_unit

    @property
    def flops_per_attended_pair(self) -> float:
        return super().flops_per_attended_pair * self.token_unit**2

    @property
    def weights_bytes(self) -> float:
        """Size in bfloat16 of all matrices, the head, and an embedding that is not tied to it."""
        # Forward and backward pass take 6 FLOPs for each weight that a token meets; the embedding is looked up.
        return 2 * (self.flops_per_token / self.token_unit / 6 + self.hidden_size * self.vocab_size)


def coarse_workload(
    model: str, unit: int, read: Callable[[Path], TransformerWorkload]
) -> CoarseWorkload:
    """Return the work of a model's sequences in units of ``unit`` tokens.

    ``model`` is a folder whose config.json ``read`` reads, or `UserError`; empty: a model of 7.6 billion parameters.
    """
    if not model:
        return CoarseWorkload(**_BUILT_IN, token_unit=unit)
    folder = model_folder(model)
    if not (folder / "config.json").is_file():
        raise UserError(f"model is {model!r}; expected a Hugging Face folder with config.json")
    try:
        return CoarseWorkload(**vars(read(folder)), token_unit=unit)
    except (ValueError, OSError) as error:
        raise UserError(
            f"model is {model!r}; expected a config.json that loads ({error})"
        ) from None


def draw_length(u: float, config: LengthModel, unit: int) -> int:
    """Return the ``u`` quantile of the lengths in units of ``unit`` tokens, at least one."""
    return max(1, round(log_normal(u, median=config.median, sigma=config.sigma) / unit))


def drawn_prompts(config: SimConfig, seed: int, longest: int, *, at_least: int) -> list[Prompt]:
    """Return ``at_least`` prompts or more, of drawn lengths up to ``longest`` tokens, each of one token of its own."""
    unit = config.token_unit
    prompts: list[Prompt] = []
    for index in range(max(_NUM_PROMPTS, at_least)):
        u = uniform(seed, _TRAIN_PROMPT_STREAM, index)
        size = min(longest // unit, draw_length(u, config.prompt_length, unit))
        prompts.append(Prompt(text="", token_ids=(index,) * size, row={}))
    return prompts


def coarse_prompts(prompts: Sequence[Prompt], unit: int) -> list[Prompt]:
    """Return prompts of the same lengths, each of one token of its own for every ``unit`` tokens."""
    coarse: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        size = max(1, round(len(prompt.token_ids) / unit))
        coarse.append(replace(prompt, token_ids=(index,) * size))
    return coarse


def decode_sample_name(token_ids: Any, *, skip_special_tokens: bool) -> str:
    """Return the number that all tokens of a sample are, as a tokenizer's text: see `sample_name`."""
    assert skip_special_tokens
    return str(int(token_ids[0]))


class Replay:
    """Responses by prompt index, which is a prompt's place in the order of sampling; after the last it starts again.

    Args:
        steps: the responses that each step sampled, in the run's order; `ValueError` if there are none.
        num_kept: groups of each step whose scores differed.
        n: responses to a prompt.
        sigma: standard deviation of the lengths' logarithm.
        seed: of the order within a step.
    """

    def __init__(
        self,
        steps: Sequence[SampledLengths],
        num_kept: Sequence[int],
        *,
        n: int,
        sigma: float,
        seed: int,
    ) -> None:
        random = np.random.default_rng(seed)
        lengths = [random.permutation(step.spread(sigma=sigma)).reshape(-1, n) for step in steps]
        signals = [
            random.permutation(np.arange(len(step)) < num)
            for step, num in zip(lengths, num_kept, strict=True)
        ]
        self._lengths = np.concatenate(lengths)
        self._signals = np.concatenate(signals)
        if not len(self._lengths):
            raise ValueError("steps have 0 samples; expected at least one")
        self._rows: dict[int, int] = {}
        """The row of each group that has been sampled, by the key that samples' names hold."""

    def length(self, request: Request, index: int) -> int:
        """Return the tokens of one response to a request, whose id is its prompt index."""
        row = int(request.request_id) % len(self._lengths)
        self._rows[group_and_index(sample_name(request.seed, index))[0]] = row
        return int(self._lengths[row, index])

    def has_signal(self, group: int) -> bool:
        """Return whether the scores of a group differ; ``group`` is the key of one whose responses were sampled."""
        return bool(self._signals[self._rows[group]])


class SimulatedTokens(SimulatedModality[Request, Completion]):
    """Responses of drawn or replayed lengths.

    A length depends on the seed, its request's seed and its index, unless it is replayed. All tokens of a response are
    its name (see `sample_name`), and its arrays have one entry in memory, so that long ones cost no more than short
    ones. An entry of the program's arrays stands for ``token_unit`` tokens; a step makes one token. ``flops`` returns
    the FLOPs of a micro-batch.
    """

    def __init__(
        self,
        config: SimConfig,
        workload: CoarseWorkload,
        *,
        seed: int,
        flops: Callable[[Sequence[Sample]], float],
        replay: Replay | None = None,
    ) -> None:
        self._config = config
        self._seed = seed
        self._flops = flops
        self._length = self._draw if replay is None else replay.length
        self.weights_bytes = workload.weights_bytes
        self.workload = workload

    def size(self, request: Request, index: int) -> tuple[float, float, float]:
        unit = self._config.token_unit
        prefix = _prefix(request, index)
        length = min(self._length(request, index), request.sampling.max_tokens)
        num_before = 0 if prefix is None else prefix.token_ids.size
        return length * unit, num_before * unit, len(request.prompt_token_ids) * unit

    def sample(
        self, request: Request, index: int, num_steps: float, *, version: int, is_aborted: bool
    ) -> Completion:
        unit = self._config.token_unit
        prefix = _prefix(request, index)
        num_tokens, num_before, _ = self.size(request, index)
        size = round(num_steps / unit)
        if is_aborted:
            # A response that would have ended at this very moment still lacks its last token.
            size = int(min(num_steps, num_tokens - num_before - unit) / unit + 1e-9)
            finish_reason = "abort"
        elif num_tokens >= request.sampling.max_tokens * unit:
            finish_reason = "length"
        else:
            finish_reason = "stop"
        extend = partial(_extend, size=size)
        return Completion(
            request_id=request.request_id,
            index=index,
            token_ids=extend(
                prefix and prefix.token_ids, np.int64(sample_name(request.seed, index))
            ),
            log_probs=extend(prefix and prefix.log_probs, np.float32(-1.0)),
            weight_versions=extend(prefix and prefix.weight_versions, np.int32(version)),
            finish_reason=finish_reason,
        )

    def flops(self, micro_batch: Sequence[Sample]) -> float:
        return self._flops(micro_batch)

    def num_tokens(self, micro_batch: Sequence[Sample]) -> float:
        prompts = {(sample.prompt_key, sample.prompt_ids.size) for sample in micro_batch}
        num_entries = sum(size for _, size in prompts) + sum(
            sample.response_ids.size for sample in micro_batch
        )
        return float(num_entries * self._config.token_unit)

    def outputs(self, sample: Sample) -> NDArray[np.float32]:
        return np.broadcast_to(np.float32(0.0), sample.response_ids.size)

    def _draw(self, request: Request, index: int) -> int:
        config = self._config
        u = uniform(self._seed, _LENGTH_STREAM, request.seed, index)
        if config.prompt_share:
            # A prompt is all of one token, which no other prompt has.
            prompt_u = uniform(self._seed, _PROMPT_STREAM, request.prompt_token_ids[0])
            u = blend(prompt_u, u, config.prompt_share)
        return draw_length(u, config.response_length, config.token_unit)


def _prefix(request: Request, index: int) -> Completion | None:
    return next((completion for completion in request.prefixes if completion.index == index), None)


def _extend(prefix: NDArray[Any] | None, value: np.generic, *, size: int) -> NDArray[Any]:
    """Return the entries that were made before, and ``size`` more of one value: [T]."""
    new: NDArray[Any] = np.ndarray((size,), value.dtype, value.tobytes(), strides=(0,))
    if prefix is None:
        return new
    return np.concatenate([prefix, new])
