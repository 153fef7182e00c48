"""A transformers model over packed micro-batches: log-probabilities of response tokens, or their states' values."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
)

from gcore_trainer.config import LoRAConfig
from gcore_trainer.context_parallel.groups import ContextParallel
from gcore_trainer.errors import BatchError, StateError, UnsupportedModelError
from gcore_trainer.lora import add_lora
from gcore_trainer.packing.attention import ATTENTION_NAME, mix_by_sequence, register
from gcore_trainer.packing.router_replay import transformers_routers
from gcore_trainer.packing.row import Row, RowMaker
from gcore_trainer.packing.token_scores import ScoresT, named_scores
from gcore_trainer.packing.vision import VISION_MODELS, Vision
from gcore_trainer.sample import NOTHING, MicroBatch, Sample
from gcore_trainer.torch.length_dependent_rope import freeze_rope
from gcore_trainer.torch.model_probe import check_scores, probe_samples

_SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LINEAR_ATTENTION_MODELS = {"olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Model types whose layers of type ``linear_attention`` are computed too: those layers have a ``linear_attn``."""


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
            scores that differ from those of transformers itself (see `model_probe`).
    """

    scores: ClassVar[Literal["tokens", "values"]]
    _auto_class: ClassVar[Any]
    _vision_class: ClassVar[Any] = None
    _new_weights: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that a folder may lack."""

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
        self._routers = transformers_routers(model)
        self._recorded: list[list[NDArray[np.int16]]] | None = None
        self._context = ContextParallel()
        if self._has_linear_attention:
            for layer in self.layers():
                if hasattr(layer, "linear_attn"):
                    mix_by_sequence(layer.linear_attn)
        self._casts = False
        self._probe(max_length)
        self.compute_dtype = compute_dtype or model.dtype
        self._casts = self.compute_dtype != model.dtype
        if lora is not None:
            add_lora(model, lora)
        if gradient_checkpointing:
            for layer in self.layers():
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
    ) -> Self:
        """Load a local Hugging Face folder.

        Args:
            path: the folder.
            dtype: of the parameters.
            device: where they are.
            options: the constructor's.

        Raises:
            UnsupportedModelError: the model has layers that packed attention does not compute.
            StateError: the folder lacks some of the model's tensors.
        """
        register()
        auto_class, attention = cls._auto_class, ATTENTION_NAME
        config = AutoConfig.from_pretrained(path)
        if (model_type := config.model_type) in VISION_MODELS:
            auto_class, attention = cls._vision_class, {"text_config": attention, "vision_config": "sdpa"}
        if auto_class is None:
            raise UnsupportedModelError(
                f"{path} is a {model_type!r} model; expected one without images for {cls.__name__}"
            )
        if type(config) not in auto_class._model_mapping:
            raise UnsupportedModelError(f"model_type is {model_type!r}; expected one that {auto_class.__name__} has")
        load = partial(auto_class.from_pretrained, path, dtype=dtype, attn_implementation=attention)
        try:
            model, loaded = load(output_loading_info=True, **cls._load_options())
        except (AttributeError, KeyError, TypeError) as error:
            # Of models that have classes of their own for every attention that they know.
            raise UnsupportedModelError(
                f"{model_type!r} does not load with an attention that is not transformers' own "
                f"({type(error).__name__}: {error})"
            ) from error
        # transformers draws at random what the files lack.
        if missing := sorted(n for n in loaded["missing_keys"] if not n.startswith(cls._new_weights)):
            raise StateError(f"the weights in {path} lack {len(missing)} of the model's tensors, such as {missing[0]}")
        return cls(model.to(device), **options)

    @classmethod
    def _load_options(cls) -> dict[str, Any]:
        return {}

    def _check_head(self, model: Any) -> None:
        """Check the model's head.

        Raises:
            UnsupportedModelError: something after the model's layers is not computed.
        """

    @abstractmethod
    def _alone(self, sample: Sample) -> torch.Tensor:
        """Scores [R] of a sample by transformers' forward pass alone."""

    def _probe(self, max_length: int | None) -> None:
        samples = probe_samples(self.model, max_length)
        lengths = [sample.response_ids.size for sample in samples]
        routing: list[NDArray[np.int16]] = []

        def packed() -> list[torch.Tensor]:
            return list(named_scores(self.score(samples)).split(lengths))

        def alone(i: int) -> torch.Tensor:
            self._impose(torch.from_numpy(routing[i].astype(np.int64)).to(self.model.device) if routing else None)
            return self._alone(samples[i])

        try:
            check_scores(self.model, samples, packed, alone)
        except UnsupportedModelError:
            if not self._routers:
                raise
            # Rounding decides between experts of nearly equal scores: now both passes take the same.
            with torch.no_grad(), self.recording_routing() as recorded:
                self.score(samples)
            routing.extend(recorded[0])
            check_scores(self.model, samples, packed, alone)
        finally:
            self._impose(None)
            self.num_computed_tokens = 0

    def layers(self) -> list[torch.nn.Module]:
        """Return the model's layers, first to last."""
        count: int = self._text_config.num_hidden_layers
        model: torch.nn.Module = self.model if self.vision is None else self.model.base_model.language_model
        stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
        return list(stacks[0])

    @property
    def num_attention_heads(self) -> int:
        """Query heads of each layer."""
        return self._text_config.num_attention_heads

    @property
    def num_routers(self) -> int:
        """Layers whose choice of experts can be recorded and imposed."""
        return len(self._routers)

    def divide_tokens(self, context: ContextParallel) -> None:
        """Hold only this rank's tokens of every row; all ranks of ``context`` score the same samples.

        Gradients of parameters are then parts, to be summed over these ranks.

        Raises:
            UnsupportedModelError: a model that sees images or has linear attention, among several ranks.
        """
        if self._has_linear_attention and context.size > 1:
            raise UnsupportedModelError(
                f"{self.model.config.model_type!r} has linear attention, and {context.size} ranks are to divide its "
                "rows; expected context and sequence parallel sizes of 1"
            )
        if self.vision is not None and context.size > 1:
            raise UnsupportedModelError(
                f"{self.model.config.model_type!r} sees images, and {context.size} ranks are to divide its rows; "
                "expected context and sequence parallel sizes of 1"
            )
        self._context = context

    def leave_casting(self) -> None:
        """Compute in the dtype that parameters are handed over in: what wraps `root` casts them."""
        self._casts = False

    @abstractmethod
    def score(self, samples: MicroBatch, *, entropy_grad: bool = False) -> ScoresT:
        """Forward pass over one micro-batch, differentiable in its result.

        Args:
            samples: at least one.
            entropy_grad: make entropies differentiable too, where there are any.

        Raises:
            UnsupportedModelError: the model has layers that did not call packed attention.
        """

    @torch.no_grad()
    def predict(self, micro_batches: Sequence[MicroBatch], num_passes: int | None = None) -> list[NDArray[np.float32]]:
        """Compute log-probabilities or values [N] of each micro-batch, without gradient.

        Args:
            micro_batches: those of this rank.
            num_passes: forward passes to make, as many as others make in whose collectives this rank takes part.
        """
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
    def _of_hidden(
        self, hidden_nD: torch.Tensor, target_ids: torch.Tensor, entropy_grad: bool
    ) -> tuple[torch.Tensor, ...]:
        """Compute the head's part of a forward pass, [n] each; FSDP finds tensors in a tuple, not in a dataclass."""

    def _run(self, samples: MicroBatch, *, entropy_grad: bool = False) -> tuple[torch.Tensor, ...]:
        rows = RowMaker(
            cp=self._context,
            device=self.model.device,
            dtype=self.compute_dtype,
            share_prefix=self.share_prefix,
            replay_routing=self.scores == "tokens",
            vision=self.vision,
        )
        [row] = rows.make([samples])
        longest = max(s.prompt_ids.size + s.response_ids.size - 1 for s in samples)
        if self._longest is not None and longest > self._longest:
            raise BatchError(f"a sample has {longest} input tokens; expected at most max_length = {self._longest}")
        self.num_computed_tokens += row.num_tokens
        self._impose(row.routing)
        with self._casting():
            scores = self.root(row, entropy_grad)
        if self._recorded is not None:
            chosen = [router.recorded.pop() for router in self._routers if router.recorded]
            self._recorded.append(row.of_samples(torch.stack(chosen, dim=1)))
        return scores

    def _impose(self, routing_TLK: torch.Tensor | None) -> None:
        """Impose a routing until the next pass, because a backward pass may compute layers again."""
        if routing_TLK is not None:
            own = (self.num_routers, *{router.top_k for router in self._routers})
            if routing_TLK.shape[1:] != own:
                raise BatchError(
                    f"routed_experts has layers and experts {tuple(routing_TLK.shape[1:])}: the model has {own}"
                )
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
        return tuple(row.of_all_ranks(v) for v in self._of_hidden(hidden_nD, row.target_ids, entropy_grad))

    def _casting(self) -> AbstractContextManager[Any]:
        if not self._casts:
            return nullcontext()
        return torch.autocast(self.model.device.type, dtype=self.compute_dtype)


class _Root(torch.nn.Module):
    """Model and head under one forward pass, so that what gathers a sharded model's parameters sees both."""

    def __init__(self, model: torch.nn.Module, forward: Any) -> None:
        super().__init__()
        self.model = model
        self._forward = forward

    def forward(self, *arguments: Any) -> Any:
        return self._forward(*arguments)
