"""The shape of a language model: its parameters, and the memory and work of a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np

from gcore_placement.quantities import Floats, TransformerWorkload, check_known
from gcore_placement.workload.config_keys import require_key

MODEL_TYPES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen2_5_vl",
    "deepseek_v2",
    "deepseek_v3",
)
_BIASED_ATTENTION = ("llama", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""Types that have biases in attention where the config says so."""
_VISION_KEYS = ("depth", "hidden_size", "intermediate_size", "out_hidden_size", "patch_size")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model's shape for the planner. Counts are exactly those of transformers' causal language models.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> shape = ModelShape.from_config(json.loads(Path("model/config.json").read_text()))
        >>> shape.num_parameters
        804224
        >>> shape.adapter_parameters(rank=8)
        77824
        >>> shape.kv_values_per_token
        512
    """

    workload: TransformerWorkload
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """The projection after attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised, head by head."""
    other_parameters: int = 0
    """Parameters in addition to this shape's, such as those of a vision tower."""

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> Self:
        """Read the mapping in a `config.json` with one of MODEL_TYPES; see `TransformerWorkload.from_config`."""
        model_type = require_key(config, "model_type")
        check_known("model_type", model_type, MODEL_TYPES)
        text = config.get("text_config")
        if isinstance(text, Mapping):
            # Newer files of vision-language models have the language model's keys in a section.
            config = {**config, **cast("Mapping[str, object]", text)}
        if config.get("head_dim") is None and model_type == "qwen3":
            # Qwen3's heads have a width of their own where the config names none.
            config = {**config, "head_dim": 128}
        attention_bias = bool(config.get("attention_bias")) and model_type in _BIASED_ATTENTION
        workload = TransformerWorkload.from_config(config)
        other_parameters = 0
        if model_type == "qwen2_5_vl":
            other_parameters = _vision_parameters(config)
        return cls(
            workload=workload,
            tie_word_embeddings=bool(config.get("tie_word_embeddings")),
            qkv_bias=attention_bias or model_type in ("qwen2", "qwen2_5_vl"),
            output_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias")) and model_type == "llama",
            qk_norm=model_type in ("qwen3", "qwen3_moe"),
            other_parameters=other_parameters,
        )

    @property
    def num_parameters(self) -> int:
        """All parameters; tied embeddings count once."""
        w = self.workload
        h = w.hidden_size
        i = w.intermediate_size
        # With latent attention the matrices that compress have the biases, and their outputs are normalised.
        biased = w.cached_size + w.q_lora_rank if w.is_latent else w.query_size + w.key_value_size
        biases = self.qkv_bias * biased + self.output_bias * h
        norms = self.qk_norm * 2 * w.head_dim + w.kv_lora_rank + w.q_lora_rank + 2 * h
        attention_and_norms = w.num_attention_weights + biases + norms
        mixture = w.num_experts * (self.num_expert_parameters + h) + 3 * h * w.shared_experts_size
        dense = 3 * h * i + self.mlp_bias * (2 * i + h)
        mlps = self._sum_of_mlps(dense, mixture)
        return (
            w.num_hidden_layers * attention_and_norms
            + mlps
            + self.num_outer_parameters
            + self.other_parameters
        )

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token is computed with; of the experts, the chosen ones."""
        w = self.workload
        asleep = w.num_experts - w.num_experts_per_tok
        return self.num_parameters - w.num_moe_layers * asleep * self.num_expert_parameters

    @property
    def num_multiplied_parameters(self) -> int:
        """Active parameters that a token is multiplied by: all but an embedding that is not also the head."""
        return self.num_active_parameters - self._num_looked_up

    @property
    def num_outer_parameters(self) -> int:
        """Parameters outside the layers: the embedding, the last norm and the head."""
        w = self.workload
        num_tables = 1 if self.tie_word_embeddings else 2
        return w.hidden_size * (w.vocab_size * num_tables + 1)

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of the mean layer, rounded up."""
        return -(
            -(self.num_parameters - self.num_outer_parameters) // self.workload.num_hidden_layers
        )

    @property
    def head_flops_per_token(self) -> int:
        """FLOPs of the logits, forward and backward, which the workload includes."""
        return 6 * self.workload.hidden_size * self.workload.vocab_size

    @property
    def kv_values_per_token(self) -> int:
        """Numbers of a token in the caches of all layers: keys and values, or the compressed state."""
        return self.workload.num_hidden_layers * self.workload.cached_size

    @property
    def activations_per_token(self) -> int:
        """Numbers of a token that the backward pass of the mean layer needs.

        Inputs and outputs of both norms, 4 h; queries and what attention gives, 2 q; keys and values, 2 kv; gate, up,
        their activation and product, 4 i; each once. This is Korthikanti et al. 2022 (arXiv 2205.05198, equation 1)
        for gated MLPs and grouped queries, without dropout and with attention that keeps no scores (arXiv 2205.14135);
        a mixture of experts has i of all experts that a token goes through, and that many copies of h in and out of
        those that are chosen; latent attention has its compressed states besides, before and after their norms.
        """
        w = self.workload
        outside = 4 * w.hidden_size + w.query_size + w.value_size + w.key_value_size
        outside += 2 * (w.kv_lora_rank + w.q_lora_rank) + w.qk_rope_head_dim
        return outside + self.mlp_activations_per_token

    @property
    def mlp_activations_per_token(self) -> int:
        """Numbers of a token that the backward pass of the mean layer's MLP or experts needs, besides their input."""
        w = self.workload
        dense = 4 * w.intermediate_size
        mixture = (
            w.num_experts_per_tok * (4 * w.moe_intermediate_size + 2 * w.hidden_size)
            + 4 * w.shared_experts_size
        )
        return -(-self._sum_of_mlps(dense, mixture) // w.num_hidden_layers)

    def adapter_parameters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of a rank on all linear layers but the head and chosen experts.

        A layer of n inputs and m outputs has rank x (n + m) more (Hu et al. 2021, arXiv 2106.09685, section 4.1).
        """
        w = self.workload
        attention = sum(inputs + outputs for inputs, outputs in w.attention_matrices)
        dense = 3 * (w.hidden_size + w.intermediate_size)
        shared = 3 * (w.hidden_size + w.shared_experts_size) if w.n_shared_experts else 0
        return rank * (w.num_hidden_layers * attention + self._sum_of_mlps(dense, shared))

    def _sum_of_mlps(self, dense: int, mixture: int) -> int:
        """Return the sum over all layers of `mixture` for each mixture of experts and `dense` for each other MLP."""
        w = self.workload
        return w.num_moe_layers * mixture + (w.num_hidden_layers - w.num_moe_layers) * dense

    def parameters_read(self, num_tokens: Floats) -> Floats:
        """Return the number of parameters that a forward pass over each number of tokens reads.

        Not counted are experts without tokens, and an embedding that is not also the head, but for a row a token.
        """
        w = self.workload
        multiplied = self.num_parameters - self._num_looked_up
        if not w.num_experts:
            return np.full(num_tokens.shape, float(multiplied))
        asleep = w.num_experts * (1 - w.num_experts_per_tok / w.num_experts) ** num_tokens
        return multiplied - w.num_moe_layers * asleep * self.num_expert_parameters

    @property
    def _num_looked_up(self) -> int:
        return (
            0 if self.tie_word_embeddings else self.workload.vocab_size * self.workload.hidden_size
        )

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of one expert of one layer; 0 without a mixture."""
        return 3 * self.workload.hidden_size * self.workload.moe_intermediate_size


def _vision_parameters(config: Mapping[str, object]) -> int:
    """Return the parameters of Qwen2.5-VL's vision tower; every linear layer but the first has a bias."""
    vision: Any = require_key(config, "vision_config")
    depth, h, i, out, patch = (int(cast("Any", require_key(vision, key))) for key in _VISION_KEYS)
    merged = h * int(vision.get("spatial_merge_size", 2)) ** 2
    pixels = 3 * int(vision.get("temporal_patch_size", 2)) * patch**2
    attention_and_norms = 2 * h + h * 3 * h + 3 * h + h * h + h
    mlp = 3 * h * i + 2 * i + h
    merger = h + merged * merged + merged + merged * out + out
    return pixels * h + depth * (attention_and_norms + mlp) + merger
