"""A transformers model over packed micro-batches: its attention follows the row's plan."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from gcore_trainer.config import LoRAConfig
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.errors import BatchError, ConfigError, UnsupportedModelError
from gcore_trainer.lora import add_lora
from gcore_trainer.packing.linear_attention import mix_by_sequence
from gcore_trainer.packing.pack import AttentionKind, PackedPlan, describe_mask, window_of
from gcore_trainer.packing.router_replay import ReplayedRouter, check_routing
from gcore_trainer.packing.row import Row, ScoresT, TokenScores, make_rows, named_scores, token_scores
from gcore_trainer.packing.vision import VISION_MODELS, Vision
from gcore_trainer.sample import NOTHING, MicroBatch, Sample, by_sample
from gcore_trainer.torch.loading import check_scores, freeze_rope, input_and_target_ids, load_model, logit_changes

ATTENTION_NAME = "gcore_packed"
_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LINEAR_ATTENTION_MODELS = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Model types whose layers of type ``linear_attention`` are computed too: those layers have a ``linear_attn``."""
_UNSUPPORTED_ARGUMENTS = ("position_bias", "indices", "block_indices")
"""Arguments of a model's attention that change its result, and that are not computed here."""


def _attend(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    if packed is None:
        raise UnsupportedModelError(
            "the model does not pass the keyword arguments of its forward pass on to its attention: packed training "
            "needs it to"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if others.get(name) is not None:
            raise UnsupportedModelError(f"the model's attention uses {name!r}: packed training does not compute it")
    if attention_mask is not None:
        # Some models have their window in the mask alone; where both have one, transformers' eager attention and SDPA
        # follow the mask.
        sliding_window = window_of(attention_mask)
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedModelError(f"sliding_window is {sliding_window}; expected at least 1, or none")
    kind = AttentionKind(scale=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    return packed.attend(query, key, value, kind), None


def register() -> None:
    """Make ``attn_implementation="gcore_packed"`` known to transformers, through its own extension points."""
    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, describe_mask)


class PackedTransformer(ABC, Generic[ScoresT]):
    """Scores samples with a transformers model, computing no padding and every shared prompt once.

    Models of `vision.VISION_MODELS` see the images of samples; their vision tower learns with the rest.

    Args:
        model: loaded with ``attn_implementation=ATTENTION_NAME``; use `from_pretrained`.
        share_prefix: compute equal prompts of a micro-batch once.
        compute_dtype: of matrix products, which may differ from the parameters'; None: the parameters' own.
        gradient_checkpointing: keep only each layer's input for the backward pass, and compute the rest again.
        lora: train adapters, and nothing else; None: all parameters.
        max_length: tokens of the longest prompt and response of the run. Models whose rotary embeddings depend on the
            length (rope_type ``longrope`` or ``dynamic``) need it, and compute every sequence as one of this length.

    Raises:
        UnsupportedModelError: the model has another attention implementation, layers that are no such attention, or
            scores that differ from those of transformers itself (see `loading.check_scores`).
    """

    scores: ClassVar[Literal["tokens", "values"]]
    _auto_class: ClassVar[Any]
    _vision_class: ClassVar[Any] = None
    _new_weights: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that a folder may lack."""
    _load_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        model: Any,
        *,
        share_prefix: bool = True,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool = False,
        lora: LoRAConfig | None = None,
        max_length: int | None = None,
    ) -> None:
        # Any other attention ignores the plan that `score` hands it, and would let sequences see each other.
        self._text_config = model.config.get_text_config()
        if self._text_config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(
                f"the model's attn_implementation is {self._text_config._attn_implementation!r}; expected "
                f"{ATTENTION_NAME!r}; {type(self).__name__}.from_pretrained loads it so"
            )
        layer_types: set[str] = set(getattr(self._text_config, "layer_types", None) or ())
        self._has_linear_attention = "linear_attention" in layer_types
        if self._text_config.model_type in _LINEAR_ATTENTION_MODELS:
            layer_types.discard("linear_attention")
        if unsupported := sorted(layer_types - _SUPPORTED_LAYER_TYPES):
            raise UnsupportedModelError(
                f"{model.config.model_type!r} has layers of type {', '.join(unsupported)}: packed training computes "
                f"{' and '.join(sorted(_SUPPORTED_LAYER_TYPES))} only"
            )
        self._check_head(model)
        self._longest = max_length if freeze_rope(model, max_length) else None
        # A packed row has no padding: a pad token in it was written by someone, and learns like any other.
        model.get_input_embeddings().padding_idx = None
        self.lora = lora
        self.model = model
        self.vision = Vision(model) if model.config.model_type in VISION_MODELS else None
        """Vision tower of the model; None: there is none."""
        self.share_prefix = share_prefix
        self.compute_dtype = model.dtype
        self.root = _Root(model, self._forward)
        """Module of the whole forward pass; FSDP wraps it."""
        self.num_computed_tokens = 0
        """Tokens that have passed through the model."""
        routers: list[Any] = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._routers = [ReplayedRouter(r, num_experts=r.num_experts, top_k=r.top_k) for r in routers]
        self.num_routers = len(routers)
        """Layers whose choice of experts can be recorded and imposed."""
        self._recorded: list[list[NDArray[np.int16]]] | None = None
        self._context: ContextParallel | None = None
        if self._has_linear_attention:
            for layer in self.layers():
                if hasattr(layer, "linear_attn"):
                    mix_by_sequence(layer.linear_attn)
        self.casts = False
        """Whether passes are cast to ``compute_dtype`` here; what wraps `root` may cast parameters itself."""
        self._probe(max_length)
        self.compute_dtype = compute_dtype or model.dtype
        self.casts = self.compute_dtype != model.dtype
        if lora is not None:
            add_lora(model, lora)
        if gradient_checkpointing:
            for layer in self.layers():
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of each layer."""
        return self._text_config.num_attention_heads

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
    ) -> Self:
        """Load a local Hugging Face folder.

        Raises:
            UnsupportedModelError: the model has layers that packed attention does not compute.
            StateError: the folder lacks some of the model's tensors.
        """
        register()
        auto_class, attention = cls._auto_class, ATTENTION_NAME
        if (config := AutoConfig.from_pretrained(path)).model_type in VISION_MODELS:
            auto_class, attention = cls._vision_class, {"text_config": attention, "vision_config": "sdpa"}
        if auto_class is None:
            raise UnsupportedModelError(
                f"{path} is a {config.model_type!r} model; expected one without images for {cls.__name__}"
            )
        load = partial(load_model, auto_class, config, path, new_weights=cls._new_weights, **cls._load_options)
        return cls(load(dtype=dtype, attn_implementation=attention).to(device), **options)

    def _check_head(self, model: Any) -> None:
        """Refuse a head that is not computed."""

    @abstractmethod
    def alone(self, sample: Sample) -> torch.Tensor:
        """Return scores [R] of a sample by transformers' forward pass alone."""

    def _probe(self, max_length: int | None) -> None:
        """Check that a packed row is scored as by transformers; see `loading.check_scores`."""
        check_scores(self, max_length)
        self.num_computed_tokens = 0

    def layers(self) -> list[torch.nn.Module]:
        """Return the model's layers, first to last."""
        count: int = self._text_config.num_hidden_layers
        model: torch.nn.Module = self.model if self.vision is None else self.model.base_model.language_model
        stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
        return list(stacks[0])

    def divide_tokens(self, context: ContextParallel) -> None:
        """Compute a part of every row on each of several ranks.

        Gradients are then parts, to be summed over these ranks.

        Raises:
            UnsupportedModelError: a model that sees images or has linear attention, among several ranks.
        """
        if context.size == 1:
            return
        for is_undivided, what in ((self._has_linear_attention, "has linear attention"), (self.vision, "sees images")):
            if is_undivided:
                raise UnsupportedModelError(
                    f"{self.model.config.model_type!r} {what}, and {context.size} ranks are to divide its rows; "
                    "expected context and sequence parallel sizes of 1"
                )
        self._context = context

    @abstractmethod
    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> ScoresT:
        """Forward pass over one micro-batch, differentiable in its result.

        Raises:
            UnsupportedModelError: the model has layers that did not call packed attention.
        """

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[MicroBatch], num_passes: int | None = None) -> list[NDArray[np.float32]]:
        """Compute log-probabilities or values [N] of each micro-batch, without gradient."""
        results: list[NDArray[np.float32]] = []
        for i in range(len(micro_batches) if num_passes is None else num_passes):
            scores = self.score(micro_batches[i] if i < len(micro_batches) else NOTHING)
            if i < len(micro_batches):
                results.append(named_scores(scores).float().cpu().numpy())
        return results

    @contextmanager
    def recording_routing(self) -> Generator[list[list[NDArray[np.int16]]]]:
        """Collect the experts that routers choose in the passes inside: [P + R - 1, L, K] of a pass's samples."""
        self._recorded = recorded = []
        try:
            yield recorded
        finally:
            self._recorded = None
            for router in self._routers:
                router.recorded = None

    @abstractmethod
    def _of_hidden(self, hidden_nD: torch.Tensor, row: Row, entropy_grad: bool) -> tuple[torch.Tensor, ...]:
        """Compute the head's part of a forward pass, [n] each; FSDP finds tensors in a tuple, not in a dataclass."""

    def _run(self, samples: MicroBatch, *, entropy_grad: bool = False) -> tuple[torch.Tensor, ...]:
        [row] = make_rows(
            [samples],
            cp=self._context,
            device=self.model.device,
            dtype=self.compute_dtype,
            share_prefix=self.share_prefix,
            replay_routing=self.scores == "tokens",
            vision=self.vision,
        )
        longest = max(s.prompt_ids.size + s.response_ids.size - 1 for s in samples)
        if self._longest is not None and longest > self._longest:
            raise BatchError(f"a sample has {longest} input tokens; expected at most max_length = {self._longest}")
        self.num_computed_tokens += row.num_tokens
        self.impose(row.routing)
        with torch.autocast(self.model.device.type, dtype=self.compute_dtype, enabled=self.casts):
            scores = self.root(row, entropy_grad)
        if self._recorded is not None:
            chosen = [router.recorded.pop() for router in self._routers if router.recorded]
            self._recorded.append(row.of_samples(torch.stack(chosen, dim=1)))
        return scores

    def impose(self, routing_TLK: torch.Tensor | None) -> None:
        """Impose a routing until the next pass, because a backward pass may compute layers again."""
        if routing_TLK is not None:
            check_routing(routing_TLK, (self.num_routers, *{router.top_k for router in self._routers}))
        for layer, router in enumerate(self._routers):
            router.imposed = None if routing_TLK is None else routing_TLK[:, layer]
            router.recorded = None if self._recorded is None else []

    def _forward(self, row: Row, entropy_grad: bool) -> tuple[torch.Tensor, ...]:
        if self.vision is None:
            inputs = {"input_ids": row.input_ids, "position_ids": row.positions}
        else:
            embeddings_1TD = self.vision.embed(row.input_ids, row.images)
            positions = row.positions if row.images is None else row.images.positions
            inputs = {"inputs_embeds": embeddings_1TD, "position_ids": positions}
        output = self.model.base_model(**inputs, use_cache=False, packed=row.plan)
        # A layer that mixes tokens in another way would mix those of different sequences, without an error.
        num_layers = self._text_config.num_hidden_layers
        if row.plan.num_calls < num_layers:
            raise UnsupportedModelError(
                f"{row.plan.num_calls} of the {num_layers} layers of {self.model.config.model_type!r} called "
                "transformers' attention interface: packed training needs all of them to"
            )
        hidden_nD = output.last_hidden_state[0][row.source_index].to(self.compute_dtype)
        return tuple(row.of_all_ranks(v) for v in self._of_hidden(hidden_nD, row, entropy_grad))


class _Root(torch.nn.Module):
    """Model and head under one forward pass, so that what gathers a sharded model's parameters sees both."""

    def __init__(self, model: torch.nn.Module, forward: Any) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *arguments: Any) -> Any:
        return self._forward(*arguments)


class PackedModel(PackedTransformer[TokenScores]):
    """A causal LM: log-probabilities and entropies of response tokens.

    Args:
        temperature: divides the logits, as it did at generation.
    """

    scores = "tokens"
    _auto_class = AutoModelForCausalLM
    _vision_class = AutoModelForImageTextToText

    def __init__(self, model: Any, *, temperature: float = 1.0, **options: Any) -> None:
        if not 0 < temperature < np.inf:
            raise ConfigError(f"temperature is {temperature}; expected a finite number above 0")
        self._logit_scale, self._softcap = logit_changes(model.config.get_text_config())
        self.temperature = temperature
        super().__init__(model, **options)

    def alone(self, sample: Sample) -> torch.Tensor:
        input_ids, target_ids = input_and_target_ids(sample, self.model.device)
        logits_RV = self.model(input_ids=input_ids, use_cache=False).logits[0, -target_ids.numel() :]
        return (logits_RV.float() / self.temperature).log_softmax(-1).gather(1, target_ids[:, None])[:, 0]

    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> TokenScores:
        log_probs_N, entropies_N = self._run(samples, entropy_grad=entropy_grad)
        return TokenScores(log_probs=log_probs_N, entropies=entropies_N)

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Compute log-probabilities [R] of each sample's response, without gradient."""
        return by_sample(self.predict(micro_batches), micro_batches)

    def _of_hidden(self, hidden_nD: torch.Tensor, row: Row, entropy_grad: bool) -> tuple[torch.Tensor, ...]:
        head: Any = self.model.get_output_embeddings()
        scores = token_scores(
            hidden_nD,
            head.weight.to(hidden_nD.dtype),
            row.target_ids,
            bias_V=getattr(head, "bias", None),
            temperature=self.temperature,
            logit_scale=self._logit_scale,
            softcap=self._softcap,
            entropy_grad=entropy_grad,
        )
        return scores.log_probs, scores.entropies
