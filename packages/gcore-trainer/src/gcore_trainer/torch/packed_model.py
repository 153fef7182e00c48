"""A transformers model over packed micro-batches: its attention follows the row's plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from gcore_trainer.config import ABOVE_ZERO, OptimizerConfig
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.errors import BatchError, UnsupportedModelError
from gcore_trainer.lora import add_lora
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.objectives.objective import ScoresT, TokenScores
from gcore_trainer.packing.block_attention import AttentionKind
from gcore_trainer.packing.head import token_scores
from gcore_trainer.packing.linear_attention import mix_by_sequence
from gcore_trainer.packing.router_replay import ReplayedRouter, Routing, check_routing
from gcore_trainer.packing.row import PackedPlan, Row, describe_mask, make_rows, window_of
from gcore_trainer.packing.vision import VISION_MODELS, Vision, checkpoint_name
from gcore_trainer.sample import MicroBatch, Sample, by_sample, filled_up
from gcore_trainer.torch import activations, loading
from gcore_trainer.torch.optimizer import AdamW, make_adamw
from gcore_trainer.torch.streamed_folder import save_streamed

if TYPE_CHECKING:
    from gcore_trainer.trainer import Replicas

ATTENTION_NAME = "gcore_packed"
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
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if packed is None:
        raise UnsupportedModelError(
            "the model does not pass the keyword arguments of its forward pass on to its attention: packed training "
            "needs it to"
        )
    for name in _UNSUPPORTED_ARGUMENTS:
        if options.get(name) is not None:
            raise UnsupportedModelError(
                f"the model's attention uses {name!r}: packed training does not compute it"
            )
    if attention_mask is not None:
        # Some models have their window in the mask alone; where both have one, transformers' eager attention and SDPA
        # follow the mask.
        sliding_window = window_of(attention_mask)
    if sliding_window is not None and sliding_window < 1:
        raise UnsupportedModelError(
            f"sliding_window is {sliding_window}; expected at least 1, or none"
        )
    attention = AttentionKind(
        scale=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return packed.attend(query, key, value, attention), None


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
        compute_dtype: data type of parameters and passes once the model was checked in its own; None: that one.
            Trained parameters of fewer bits than float32 get float32 masters (see `AdamW`).
        gradient_checkpointing: keep only a layer's input for the backward pass, and compute the rest again; auto: in
            models of `activations.LARGE_MODEL` parameters on CUDA.
        checkpointed_layers: share of the layers that do so, the first ones.
        activation_offload: keep what is needed for the backward pass in host memory.
        lora: train adapters, and nothing else; None: all parameters.
        max_length: tokens of the longest prompt and response of the run. Models whose rotary embeddings depend on the
            length (rope_type ``longrope`` or ``dynamic``) need it, and compute every sequence as one of this length.
        weights: the `SlicedWeights` of a model without memory; `load_weights` reads them.

    Raises:
        UnsupportedModelError: the model has another attention implementation, layers that are no such attention, or
            scores that differ from those of transformers itself (see `loading.check_scores`).
    """

    scores: ClassVar[Literal["tokens", "values"]]
    auto_class: ClassVar[Any]
    vision_class: ClassVar[Any] = None
    new_weights: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that a folder may lack."""
    load_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        model: Any,
        *,
        share_prefix: bool = True,
        compute_dtype: torch.dtype | None = None,
        gradient_checkpointing: bool | Literal["auto"] = False,
        checkpointed_layers: float = 1.0,
        activation_offload: bool = False,
        lora: LoRAConfig | None = None,
        max_length: int | None = None,
        weights: Any = None,
    ) -> None:
        # Any other attention ignores the plan that `score` hands it, and would let sequences see each other.
        self._text_config = model.config.get_text_config()
        if self._text_config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(
                f"the model's attn_implementation is {self._text_config._attn_implementation!r}; expected "
                f"{ATTENTION_NAME!r}; {type(self).__name__}.from_pretrained loads it so"
            )
        self._has_linear_attention = loading.check_layer_types(
            self._text_config, model.config.model_type
        )
        self._longest = max_length if loading.freeze_rope(model, max_length) else None
        # A packed row has no padding: a pad token in it was written by someone, and learns like any other.
        model.get_input_embeddings().padding_idx = None
        self.lora = lora
        self.model = model
        self.vision = None
        if self.vision_class is not None and model.config.model_type in VISION_MODELS:
            self.vision = Vision(model)
        """Vision tower of the model; None: there is none."""
        self.share_prefix = share_prefix
        self.compute_dtype = model.dtype
        self.root = _Root(model)
        """Module of the whole forward pass; FSDP wraps it."""
        self.num_computed_tokens = 0
        """Tokens that have passed through the model."""
        self.fuses_layers = True
        """Whether fused kernels compute the operations between matrix products, if available (`fused_layers`)."""
        routers: list[Any] = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        self._routers = [
            ReplayedRouter(r, num_experts=r.num_experts, top_k=r.top_k) for r in routers
        ]
        self.num_routers = len(routers)
        """Layers whose choice of experts can be recorded and imposed."""
        self.context: ContextParallel | None = None
        """Ranks that divide the tokens of rows; None: this one computes all."""
        if self._has_linear_attention:
            for layer in self.layers():
                if hasattr(layer, "linear_attn"):
                    mix_by_sequence(layer.linear_attn)
        self._weights = weights
        self._max_length = max_length
        if weights is None:
            self._probe()
        self.compute_dtype = compute_dtype or model.dtype
        if lora is not None:
            add_lora(model, lora, head=self.new_weights)
            if weights is not None:
                weights.lora = lora
        in_float32 = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        for name, parameter in model.named_parameters():
            # Not the buffers: frequencies of rotary embeddings stay in float32.
            if not any(part in name for part in in_float32):
                parameter.data = parameter.data.to(self.compute_dtype)
        device = model.device if weights is None else weights.device
        if gradient_checkpointing and activations.is_checkpointed(
            gradient_checkpointing, model, device
        ):
            activations.checkpoint_layers(self.layers(), checkpointed_layers)
        if activation_offload:
            activations.offload_activations(self.root)
        if weights is None:
            loading.fuse_on_cuda(self)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of each layer, which some refused models do not have."""
        return self._text_config.num_attention_heads

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        sharded: bool = False,
        **options: Any,
    ) -> Self:
        """Load a local Hugging Face folder; errors are those of the class, and of `loading.load_model`.

        On CUDA and for shards, parameters are read by slices in ``compute_dtype``; see `sliced_weights`.

        Args:
            sharded: whether they are read by `TorchParallel.shard`, on each rank its own rows of them.
        """
        register()
        if not sharded and torch.device(device).type != "cuda":
            model = loading.load_model(cls, path, attention=ATTENTION_NAME, dtype=dtype)
            return cls(model.to(device), **options)
        from gcore_trainer.torch.sliced_weights import make_model

        model, weights = make_model(
            cls, path, attention=ATTENTION_NAME, dtype=dtype, device=torch.device(device)
        )
        packed = cls(model, weights=weights, **options)
        if not sharded:
            packed.load_weights()
        return packed

    def load_weights(self) -> None:
        """Read the parameters of a model on the meta device, and check it; all ranks of a sharded model call this."""
        weights = self._weights
        self._weights = None
        if weights is not None:
            weights.fill(self.model)
            with weights.checking(self):
                self._probe()
            loading.fuse_on_cuda(self)

    @abstractmethod
    def alone(self, sample: Sample) -> torch.Tensor:
        """Return scores [R] of a sample by transformers' forward pass alone."""

    def _probe(self) -> None:
        loading.check_scores(self, self._max_length)
        self.num_computed_tokens = 0

    def layers(self) -> list[torch.nn.Module]:
        """Return the model's layers, first to last."""
        count: int = self._text_config.num_hidden_layers
        model: torch.nn.Module = self.model if self.vision is None else self.model.get_decoder()
        stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
        for stack in stacks:
            if len(stack) == count:
                return list(stack)
        # Each layer counts twice, or there are stacks that are passed several times: lists outside of others.
        layers: dict[torch.nn.Module, None] = {}
        inner: set[torch.nn.Module] = set()
        for stack in stacks:
            if stack not in inner:
                layers.update(dict.fromkeys(stack))
                inner.update(stack.modules())
        return list(layers)

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by their names in a Hugging Face folder."""
        parameters: dict[str, torch.nn.Parameter] = dict(self.model.named_parameters())
        if self.vision is None:
            return parameters
        return {
            checkpoint_name(self.model, name): parameter for name, parameter in parameters.items()
        }

    def optimizer(self, config: OptimizerConfig, *, offload: bool = False) -> AdamW:
        """Return the optimizer of the trained parameters, with masters where they are of fewer bits than float32."""
        self.load_weights()
        trained = {name: p for name, p in self.named_parameters().items() if p.requires_grad}
        return make_adamw(trained, config, offload=offload, model=self.model)

    def save_pretrained(
        self,
        path: str | Path,
        weights: Iterable[tuple[str, torch.Tensor]],
        ranks: "Replicas",
    ) -> None:
        """Write a Hugging Face folder of full tensors. All ``ranks`` call it; each writes a share, a file at a time."""
        save_streamed(self.model, Path(path), weights, ranks)

    def divide_tokens(self, context: ContextParallel) -> None:
        """Compute a part of every row on each of several ranks, whose gradients are then to be summed.

        Raises:
            UnsupportedModelError: a model that sees images or has linear attention, among several ranks.
        """
        if context.size == 1:
            return
        reason = "sees images" if self.vision else None
        if self._has_linear_attention:
            reason = "has linear attention"
        if reason is not None:
            raise UnsupportedModelError(
                f"{self.model.config.model_type!r} {reason}, and {context.size} ranks are to divide its rows; "
                "expected context and sequence parallel sizes of 1"
            )
        self.context = context

    def score(
        self, samples: MicroBatch, *, entropy_grad: bool = False, routing: Routing | None = None
    ) -> ScoresT:
        """Score one micro-batch differentiably, in float32 at least.

        Args:
            routing: gets the experts [num_inputs, L, K] that routers choose for each sample; None: they are not kept.

        Raises:
            UnsupportedModelError: the model has layers that did not call packed attention.
        """
        parts = self._pass(samples, entropy_grad, routing)
        scores: Any = parts[0]
        if self.scores == "tokens":
            scores = TokenScores(log_probs=parts[0], entropies=parts[1])
        return scores

    def _pass(
        self, samples: MicroBatch, entropy_grad: bool, routing: Routing | None
    ) -> Sequence[torch.Tensor]:
        [row] = make_rows(
            [samples],
            cp=self.context,
            device=self.model.device,
            share_prefix=self.share_prefix,
            replay_routing=self.scores == "tokens",
            vision=self.vision,
        )
        if self._longest is not None:
            longest = int(row.batch.positions.max()) + 1
            if longest > self._longest:
                raise BatchError(
                    f"a sample has {longest} input tokens; expected at most max_length = {self._longest}"
                )
        self.num_computed_tokens += row.num_tokens
        self.impose(row.routing)
        for router in self._routers:
            router.recorded = None if routing is None else []
        scores = self.root(self._forward, row, entropy_grad)
        if routing is not None:
            chosen = [router.recorded.pop() for router in self._routers if router.recorded]
            routing.append(row.of_samples(torch.stack(chosen, dim=1)))
        return scores

    @abstractmethod
    def _of_hidden(
        self, hidden_nD: torch.Tensor, row: Row, entropy_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Compute the head's part of a forward pass, [n] each; FSDP finds tensors in a tuple, not in a dataclass."""

    @torch.no_grad()
    def predict(
        self,
        micro_batches: Sequence[MicroBatch],
        num_passes: int | None = None,
        routing: Routing | None = None,
    ) -> list[NDArray[np.float32]]:
        """Compute log-probabilities or values [N] of each micro-batch, without gradient; ``routing`` as in `score`."""
        passes = filled_up(micro_batches, num_passes or 0)
        scores = [
            self._pass(samples, False, routing)[0].float().cpu().numpy() for samples in passes
        ]
        return scores[: len(micro_batches)]

    def impose(self, routing_TLK: torch.Tensor | None) -> None:
        """Impose a routing until the next pass: a backward pass may compute layers again."""
        if routing_TLK is not None:
            check_routing(
                routing_TLK, (self.num_routers, *{router.top_k for router in self._routers})
            )
        for layer, router in enumerate(self._routers):
            router.recorded = None
            router.imposed = None if routing_TLK is None else routing_TLK[:, layer]

    def _forward(self, row: Row, entropy_grad: bool) -> tuple[torch.Tensor, ...]:
        decoder = self.model.base_model
        inputs = {"input_ids": row.input_ids}
        if self.vision is not None:
            decoder = self.model.get_decoder()
            inputs = self.vision.decoder_inputs(row.input_ids, row.images)
        positions = row.positions if row.images is None else row.images.positions
        output = decoder(position_ids=positions, **inputs, use_cache=False, packed=row.plan)
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
    """Model and head under one forward pass, so that FSDP gathers the parameters of both."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


class PackedModel(PackedTransformer[TokenScores]):
    """A causal LM: log-probabilities and entropies of response tokens.

    Args:
        temperature: divides the logits, as it did at generation.

    Example:
        >>> packed = PackedModel.from_pretrained("model", temperature=0.7)
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))
        >>> log_probs = packed.log_probs([[sample]])
        >>> log_probs[0][0].shape
        (3,)
    """

    scores = "tokens"
    auto_class = AutoModelForCausalLM
    vision_class = AutoModelForImageTextToText

    def __init__(self, model: Any, *, temperature: float = 1.0, **options: Any) -> None:
        ABOVE_ZERO.require("temperature", temperature)
        self._logit_scale, self._softcap = loading.logit_changes(model.config.get_text_config())
        self.temperature = temperature
        super().__init__(model, **options)

    def alone(self, sample: Sample) -> torch.Tensor:
        input_ids, target_ids = loading.input_and_target_ids(sample, self.model.device)
        logits_RV = self.model(input_ids=input_ids, use_cache=False).logits[
            0, -target_ids.numel() :
        ]
        return (
            (logits_RV.float() / self.temperature)
            .log_softmax(-1)
            .gather(1, target_ids[:, None])[:, 0]
        )

    def log_probs(self, micro_batches: Sequence[MicroBatch]) -> list[list[NDArray[np.float32]]]:
        """Compute log-probabilities [R] of each sample's response, without gradient."""
        return by_sample(self.predict(micro_batches), micro_batches)

    def _of_hidden(
        self, hidden_nD: torch.Tensor, row: Row, entropy_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        head: Any = self.model.get_output_embeddings()
        scores = token_scores(
            hidden_nD,
            head.weight,
            row.target_ids,
            bias_V=getattr(head, "bias", None),
            temperature=self.temperature,
            logit_scale=self._logit_scale,
            softcap=self._softcap,
            entropy_grad=entropy_grad,
            kept=row.kept,
        )
        return scores.log_probs, scores.entropies
