"""The model in the `hf` engine: its loading, slots of keys and values, attention over them, and the draw of tokens.

Tokens reach the model packed in one row, [1, T], so no padding passes through the matrix products. Keys and values live
in slots of a preallocated cache, one live sample a slot, slots 0..B-1 in use; only attention itself sees a rectangle.

Shapes: T packed tokens, B live samples, P prompts, Lq/Lk longest query/key in tokens, H query heads, K key-value heads,
D head dimension, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from gcore_rollout.engines.hf.plain_attention import Rule, attend, attend_block, attend_causally
from gcore_rollout.errors import EngineModelError, RolloutError
from gcore_rollout.images.vision_processor import VISION_MODELS, VisionProcessor

ATTENTION_NAME = "gcore_slots"

_LEAVE_WINDOW_TO_MASK = ("phimoe", "qwen2_moe")
"""Models whose attention is not given the sliding window that transformers' masks have for it."""

_MAX_DIFFERENCE = 1e-3
"""Largest difference of log-probabilities of dense models in float32, whose rounding is far below."""
_MAX_ROUNDED_DIFFERENCE = 0.1
"""Largest difference with fewer bits, or with experts, between which rounding may decide."""
_FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of models that are called in a way that they do not know."""


def fused_attention(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context without cuDNN's attention, which plans every new shape for 0.4 s."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )


def to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy an array to the device; on CUDA from pinned memory, for which the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def load_model(
    path: str | Path, *, dtype: torch.dtype, max_model_len: int | None
) -> tuple[Any, VisionProcessor | None]:
    """Load a local Hugging Face folder with the engine's attention, and its image processor if it reads images."""
    config = AutoConfig.from_pretrained(path)
    text_config: Any = config.get_text_config()
    vision: VisionProcessor | None = None
    attention: Any = ATTENTION_NAME
    auto_class: Any = AutoModelForCausalLM
    if config.model_type in VISION_MODELS:
        vision = VisionProcessor.from_pretrained(path)
        attention = {"text_config": ATTENTION_NAME, "vision_config": "sdpa"}
        auto_class = AutoModelForImageTextToText
    try:
        model, loaded = auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            # Reported below, by name.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, KeyError, TypeError) as error:
        # Raised by models that have classes of their own for every attention that they know.
        raise EngineModelError(
            f"{config.model_type!r} does not load with an attention that is not transformers' own "
            f"({type(error).__name__}: {error}): the vllm engine may run it"
        ) from error
    except (ArithmeticError, ImportError, RuntimeError, ValueError) as error:
        raise RolloutError(
            f"the model in {path} does not load ({type(error).__name__}: {error})"
        ) from error
    # transformers draws at random what the files lack.
    for name in sorted(loaded["missing_keys"]):
        count = len(loaded["missing_keys"])
        raise RolloutError(
            f"the weights in {path} lack {count} of the model's tensors, such as {name}"
        )
    for name, in_file, expected in sorted(loaded["mismatched_keys"]):
        raise RolloutError(
            f"the weights in {path} do not fit its config.json: {name} has shape {list(in_file)}; expected "
            f"{list(expected)}"
        )
    # transformers itself ignores an attention that the model never calls, and the samples would mix.
    unknown_types = set(getattr(text_config, "layer_types", None) or ()) - {
        "full_attention",
        "sliding_attention",
    }
    if not model.is_backend_compatible() or unknown_types:
        raise EngineModelError(
            f"{config.model_type!r} does not run all its layers through transformers' attention interface: "
            "the hf engine cannot run it, the vllm engine may"
        )
    longest = longest_sequence(text_config)
    if max_model_len is not None and longest < min(
        max_model_len, text_config.max_position_embeddings
    ):
        raise EngineModelError(
            f"max_model_len is {max_model_len}; expected at most {longest} for rope_type 'longrope' of "
            f"{config.model_type!r}, whose factors change there: the vllm engine computes longer sequences"
        )
    return model, vision


def longest_sequence(config: Any) -> int:
    """Return the tokens of the longest sequence that a model of this config computes alike in every batch.

    transformers chooses the factors of rope_type ``longrope`` (LongRoPE, arXiv 2402.13753) by the largest position of a
    batch, and the base of ``dynamic`` beyond ``max_position_embeddings``.
    """
    longest: int = config.max_position_embeddings
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *rope.values()):
        if isinstance(parameters, dict) and parameters.get("rope_type") == "longrope":
            longest = min(longest, parameters["original_max_position_embeddings"])
    return longest


@torch.inference_mode()
def check_logits(
    model: Any,
    engine_logits: Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[torch.Tensor]],
    *,
    max_length: int,
    max_num_seqs: int,
) -> None:
    """Compare the engine's logits of a first and a second token with those of transformers, a sequence at a time.

    Args:
        engine_logits: returns logits [P, V] after prompts, and after one token more of each; both are given.

    Raises:
        EngineModelError: they differ by more than rounding, or the model cannot be called in this way.
    """
    model_type: str = model.config.model_type
    rng = np.random.default_rng(0)
    # One or two prompts of different lengths, which leave space for two tokens.
    lengths = [max(1, min(length, max_length - 2)) for length in (12, 5)]
    vocab_size: int = model.get_input_embeddings().num_embeddings
    prompts = [rng.integers(0, vocab_size, length).tolist() for length in lengths[:max_num_seqs]]
    next_tokens = [prompt[0] for prompt in prompts]
    config = model.config.get_text_config()
    own_attention = config._attn_implementation
    try:
        after_prompts_PV, after_tokens_PV = engine_logits(prompts, next_tokens)
        config._attn_implementation = "eager"
        expected: list[torch.Tensor] = []
        for prompt, token in zip(prompts, next_tokens, strict=True):
            input_ids = torch.tensor([[*prompt, token]], device=model.device)
            logits_2V = model(input_ids=input_ids, use_cache=False).logits[0, -2:]
            expected.append(logits_2V.float().log_softmax(-1))
    except (RolloutError, torch.OutOfMemoryError):
        raise
    except _FAULTS as error:
        raise EngineModelError(
            f"the hf engine cannot run {model_type!r} ({type(error).__name__}: {error}): the vllm engine may"
        ) from error
    finally:
        config._attn_implementation = own_attention
    log_probs_P2V = torch.stack([after_prompts_PV, after_tokens_PV], dim=1).float().log_softmax(-1)
    differences_P2 = (log_probs_P2V - torch.stack(expected)).abs().mean(-1)
    rounds = model.dtype not in (torch.float32, torch.float64) or "expert" in str(
        model.config.to_dict().keys()
    )
    if model.device.type == "cuda":
        rounds |= torch.get_float32_matmul_precision() != "highest"
    limit = _MAX_ROUNDED_DIFFERENCE if rounds else _MAX_DIFFERENCE
    # A comparison with nan is false.
    if not float(differences_P2.max()) <= limit:
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise RolloutError(
                    f"{name} of {model_type!r} holds nan or infinity; expected finite weights"
                )
        raise EngineModelError(
            f"log-probabilities of {model_type!r} in the hf engine differ from those of transformers by "
            f"{float(differences_P2.max()):.2g} on average (at most {limit:g} is rounding): the model does something "
            "that the engine does not compute, the vllm engine may"
        )


def record_experts(model: Any, chosen: list[torch.Tensor]) -> None:
    """Append the experts [T, K] that each router of a model chooses, from here on, to a list.

    Raises:
        EngineModelError: the model has no routers.
    """
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    if not routers:
        raise EngineModelError(
            f"return_routed_experts is True; expected False for {model.config.model_type!r}, which has no routers"
        )

    def record(_router: Any, _inputs: Any, outputs: Sequence[torch.Tensor]) -> None:
        # Logits and weights come along, in an order that differs between models.
        chosen.extend(tensor for tensor in outputs if not tensor.is_floating_point())

    for router in routers:
        router.register_forward_hook(record)


def pack(
    prompts: Sequence[Sequence[int]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Return prompts in one row: tokens [T], their places in their prompts [T] and in a flat rectangle [P, Lq] [T], the
    end of each prompt [P], and Lq."""
    lengths = np.array([len(p) for p in prompts])
    ends = np.cumsum(lengths)
    longest = int(lengths.max())
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
    padded_index = positions + np.repeat(np.arange(len(prompts)) * longest, lengths)
    tokens = np.fromiter(chain.from_iterable(prompts), np.int64, count=int(ends[-1]))
    return tokens, positions, padded_index, ends, longest


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def truncate_logits(
    logits_BV: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor
) -> torch.Tensor:
    """Return logits that are -inf for the tokens that top-k and then top-p leave out.

    Top-p keeps the fewest most probable tokens whose probability is at least p ("The curious case of neural text
    degeneration", arXiv 1904.09751, section 3.1).

    Args:
        logits_BV: logits after the temperature.
        top_p_B: in (0, 1].
        top_k_B: 1 or more; of the vocabulary's size or more: all tokens.
    """
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    ranks_1V = torch.arange(logits_BV.shape[1], device=logits_BV.device)[None]
    sorted_BV = sorted_BV.masked_fill(ranks_1V >= top_k_B[:, None], -torch.inf)
    probs_BV = sorted_BV.softmax(dim=-1)
    before_BV = probs_BV.cumsum(dim=-1) - probs_BV
    # The most probable token is always kept.
    is_left_out_BV = (before_BV >= top_p_B[:, None]) & (top_p_B[:, None] < 1) & (ranks_1V > 0)
    sorted_BV = sorted_BV.masked_fill(is_left_out_BV, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)


def sample_tokens(
    logits_BV: torch.Tensor,
    temperatures: NDArray[np.float32],
    u: NDArray[np.float64],
    *,
    truncation: Sequence[NDArray[Any]] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at ``u``.

    Args:
        logits_BV: raw logits.
        temperatures: shape [B]; rows with 0 take the arg max.
        u: shape [B], in (0, 1).
        truncation: top-p and top-k, shape [B] each, as `truncate_logits` takes them; empty: every token can be drawn.

    Returns:
        tokens (int64, [B]), their log-probabilities (float32, [B]) at the row's temperature (1 for greedy rows), and
        those [B, V] of all tokens, -inf where they are left out.
    """
    logits_BV = logits_BV.float()
    greedy = temperatures == 0
    if (temperatures != 1).any():
        divisors = torch.from_numpy(np.where(greedy, np.float32(1), temperatures)).to(
            logits_BV.device
        )
        logits_BV = logits_BV / divisors[:, None]
    if truncation:
        limits = [torch.from_numpy(limits_B).to(logits_BV.device) for limits_B in truncation]
        logits_BV = truncate_logits(logits_BV, *limits)
    log_probs_BV = torch.log_softmax(logits_BV, dim=-1)
    cdf_BV = log_probs_BV.double().exp_().cumsum(dim=-1)
    threshold_B1 = torch.from_numpy(u).to(cdf_BV.device)[:, None] * cdf_BV[:, -1:]
    # right=True lands on the first entry strictly above the threshold, so a token of probability 0 is never drawn.
    tokens_B1 = torch.searchsorted(cdf_BV, threshold_B1, right=True).clamp_(max=cdf_BV.shape[1] - 1)
    if greedy.any():
        rows_B1 = torch.from_numpy(greedy).to(tokens_B1.device)[:, None]
        tokens_B1 = torch.where(rows_B1, logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
    return tokens_B1[:, 0], log_probs_BV.gather(1, tokens_B1)[:, 0], log_probs_BV


DecodeMode = Literal["auto", "dynamic", "static", "cuda_graphs"]
"""Computation of one token more of each sample: by shapes that fit, by static ones, or by static ones as graphs."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The most keys and values that an `HFEngine` stores: ``num_slots * slot_length`` tokens."""

    num_slots: int
    """Most samples that run at once."""
    slot_length: int
    """Longest prompt and completion in tokens, rounded up as the engine allocates it."""
    bytes_per_token: int
    """Keys and values of a token in all layers."""

    @property
    def kv_cache_bytes(self) -> int:
        """Keys and values of as many samples as run at once, each at its longest."""
        return self.num_slots * self.slot_length * self.bytes_per_token

    def limited_to(self, kv_cache_bytes: int) -> Self:
        """Return the plan with as many samples as that memory takes; a `ValueError` if it takes none."""
        per_sample = self.slot_length * self.bytes_per_token
        if kv_cache_bytes < per_sample:
            raise ValueError(
                f"kv_cache_bytes is {kv_cache_bytes:,}; expected at least {per_sample:,}, the keys and values of one "
                f"sample of {self.slot_length} tokens"
            )
        return replace(self, num_slots=min(self.num_slots, kv_cache_bytes // per_sample))


class SlotCache:
    """Keys and values of up to ``num_slots`` samples, grown as needed."""

    def __init__(self, *, num_layers: int) -> None:
        self.keys: list[torch.Tensor | None] = [None] * num_layers
        self.values: list[torch.Tensor | None] = [None] * num_layers
        self.num_slots = 0
        self.capacity = 0
        self._bytes_per_token = [0] * num_layers

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of a token in the layers that have computed any."""
        return sum(self._bytes_per_token)

    def clear(self) -> None:
        """Free everything."""
        for buffers in (self.keys, self.values):
            buffers[:] = [None] * len(buffers)
        self.num_slots = self.capacity = 0

    def reserve(self, num_slots: int, capacity: int) -> None:
        """Allocate space for ``num_slots`` samples of ``capacity`` tokens, keeping what is stored."""
        if num_slots <= self.num_slots and capacity <= self.capacity:
            return
        self.num_slots = max(num_slots, self.num_slots)
        self.capacity = max(capacity, self.capacity)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    stored_slots, num_heads, stored_length, head_dim = old.shape
                    buffers[layer] = new = old.new_zeros(
                        self.num_slots, num_heads, self.capacity, head_dim
                    )
                    new[:stored_slots, :, :stored_length] = old

    def layer(self, index: int, like_1KTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return key and value buffers [num_slots, K, capacity, D] of one layer, made on first use."""
        keys = self.keys[index]
        values = self.values[index]
        if keys is None or values is None:
            _, num_heads, _, head_dim = like_1KTD.shape
            shape = (self.num_slots, num_heads, self.capacity, head_dim)
            self.keys[index] = keys = like_1KTD.new_zeros(shape)
            self.values[index] = values = like_1KTD.new_zeros(shape)
            self._bytes_per_token[index] = 2 * num_heads * head_dim * keys.element_size()
        return keys, values

    def move(self, src: torch.Tensor, dst: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` tokens of slots ``src`` to slots ``dst`` (both [M], disjoint)."""
        for buffer in self.keys + self.values:
            if buffer is not None:
                buffer[dst, :, :length] = buffer[src, :, :length]


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Packed prompts, each computed once and written to the slots of all its samples."""

    cache: SlotCache
    padded_index: torch.Tensor
    """[T] place of each packed token in a [P, Lq] rectangle, flattened."""
    num_prompts: int
    max_length: int
    slots: torch.Tensor
    """[M] slots to fill."""
    prompts: torch.Tensor
    """[M] the prompt (row of the rectangle) that each of them holds."""
    blocks: Sequence[tuple[int, int, int]] = ()
    """Prompt, first and last + 1 of tokens that see each other (see `PromptEmbeddings.blocks`)."""

    def attend(
        self,
        layer: int,
        q_1HTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTD: torch.Tensor,
        rule: Rule,
    ) -> torch.Tensor:
        """Attention output [1, T, H, D]."""
        keys, values = self.cache.layer(layer, k_1KTD)
        q, k, v = (self._unpack(x) for x in (q_1HTD, k_1KTD, v_1KTD))
        keys[self.slots, :, : self.max_length] = k[self.prompts]
        values[self.slots, :, : self.max_length] = v[self.prompts]
        # Padding follows every prompt, so the causal mask alone hides it from the real tokens.
        gqa = q.shape[1] != k.shape[1]
        window = rule.sliding_window
        if _is_plain(rule) or (window is not None and window < self.max_length):
            out_PHLD = attend_causally(q, k, v, rule)
        else:
            if gqa and q.dtype == torch.float32 and q.device.type == "cuda":
                # Flash takes no float32, and the others would not be fused with unequal heads.
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
                gqa = False
            out_PHLD = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=rule.scale, enable_gqa=gqa
            )
        for i, start, stop in self.blocks:
            out_PHLD[i, :, start:stop] = attend_block(
                q[i, :, start:stop], k[i, :, :stop], v[i, :, :stop], rule
            )
        return out_PHLD.transpose(1, 2).flatten(0, 1)[self.padded_index][None]

    def _unpack(self, x_1HTD: torch.Tensor) -> torch.Tensor:
        _, num_heads, _, head_dim = x_1HTD.shape
        rows = x_1HTD.new_zeros(self.num_prompts * self.max_length, num_heads, head_dim)
        rows[self.padded_index] = x_1HTD[0].transpose(0, 1)
        return rows.view(self.num_prompts, self.max_length, num_heads, head_dim).transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class Decode:
    """One new token for each of the slots 0..B-1; packed token i belongs to slot i."""

    cache: SlotCache
    slots: torch.Tensor
    positions: torch.Tensor
    """[B] position of the new token in its sample."""
    mask: torch.Tensor
    """[B, 1, 1, Lk] additive mask: 0 up to and including the new token's position, -inf after it."""

    @classmethod
    def at(
        cls, positions_B: torch.Tensor, cache: SlotCache, length: int, *, dtype: torch.dtype
    ) -> Self:
        """Return the plan for tokens at these positions, all below ``length``."""
        device = positions_B.device
        is_hidden_BL = torch.arange(length, device=device) > positions_B[:, None]
        mask = torch.zeros(is_hidden_BL.shape, dtype=dtype, device=device).masked_fill_(
            is_hidden_BL, -torch.inf
        )
        slots = torch.arange(len(positions_B), device=device)
        return cls(cache=cache, slots=slots, positions=positions_B, mask=mask[:, None, None])

    def attend(
        self,
        layer: int,
        q_1HTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTD: torch.Tensor,
        rule: Rule,
    ) -> torch.Tensor:
        """Attention output [1, B, H, D]."""
        keys, values = self.cache.layer(layer, k_1KTD)
        keys[self.slots, :, self.positions] = k_1KTD[0].transpose(0, 1)
        values[self.slots, :, self.positions] = v_1KTD[0].transpose(0, 1)
        _, num_heads, batch, head_dim = q_1HTD.shape
        num_kv_heads = k_1KTD.shape[1]
        length = self.mask.shape[-1]
        # Query heads that share a key-value head are rows of one query: no repeated keys, no copy of the cache.
        q_BKGD = (
            q_1HTD[0]
            .transpose(0, 1)
            .reshape(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
        )
        k_BKLD = keys[:batch, :, :length]
        v_BKLD = values[:batch, :, :length]
        mask = self.mask
        window = rule.sliding_window
        if window is not None and window < length:
            is_outside_BL = (
                torch.arange(length, device=mask.device) <= self.positions[:, None] - window
            )
            mask = mask.masked_fill(is_outside_BL[:, None, None], -torch.inf)
        if _is_plain(rule):
            out_BKGD = attend(
                q_BKGD[:, :, :, None], k_BKLD, v_BKLD, mask[:, :, None], rule
            ).squeeze(3)
        else:
            out_BKGD = scaled_dot_product_attention(
                q_BKGD, k_BKLD, v_BKLD, attn_mask=mask, scale=rule.scale
            )
        return out_BKGD.reshape(1, batch, num_heads, head_dim)


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slots: Prefill | Decode | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if slots is None:
        raise EngineModelError(
            f"{type(module).__name__} is not given the keyword arguments of the model's forward pass: the hf engine "
            "needs them, the vllm engine may run the model"
        )
    # Masks are not asked for: this one is the model's own.
    if attention_mask is not None:
        raise EngineModelError(
            f"{type(module).__name__} computes an attention mask of its own: the hf engine does not apply it, the vllm "
            "engine may"
        )
    layer = module.layer_idx
    assert isinstance(layer, int)
    if sliding_window is None:
        sliding_window = _window_of_mask(module, layer)
    if sliding_window is not None and sliding_window < 1:
        raise EngineModelError(f"sliding_window is {sliding_window}; expected at least 1, or none")
    rule = Rule(scale=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    return slots.attend(layer, query, key, value, rule), None


AttentionInterface.register(ATTENTION_NAME, _forward)


def _is_plain(rule: Rule) -> bool:
    """Return whether torch's own attention cannot compute it."""
    return rule.softcap is not None or rule.sinks is not None


def _window_of_mask(module: torch.nn.Module, layer: int) -> int | None:
    """Return the sliding window that the config gives a layer which passes none, if it is known to apply there."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None)
    if window is None or (layer_types and layer_types[layer] != "sliding_attention"):
        return None
    if config.model_type in _LEAVE_WINDOW_TO_MASK:
        return window
    raise EngineModelError(
        f"sliding_window of {config.model_type!r} is {window}, and its layers do not pass it to their attention: "
        "the hf engine cannot tell where it applies, the vllm engine may run the model"
    )
