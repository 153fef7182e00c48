"""Changes of a transformers model to the logits of its head, read from its config."""

from dataclasses import dataclass
from typing import Any

from gcore_trainer.errors import UnsupportedModelError

_CAPPED = frozenset(
    {"gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "nanochat", "vaultgemma"}
)
"""Model types that cap their logits by ``final_logit_softcapping``."""

_DIVIDED = frozenset(
    {
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "minicpm3",
    }
)
"""Model types that divide their logits, or the hidden states before the head, by ``logits_scaling``."""

_MULTIPLIED_BY_SCALING = frozenset({"hyperclovax"})
"""Model types that multiply their logits by ``logits_scaling``."""

_MULTIPLIED = frozenset({"cohere", "cohere2", "cohere2_moe"})
"""Model types that multiply their logits by ``logit_scale``."""


@dataclass(frozen=True, kw_only=True)
class LogitChanges:
    """See the arguments of `token_scores.token_scores`."""

    scale: float = 1.0
    softcap: float | None = None


def logit_changes(config: Any) -> LogitChanges:
    """Return what a model of this config does with its logits.

    Raises:
        UnsupportedModelError: a setting changes them in a way that is not known of this type of model.
    """
    model_type = config.model_type
    softcap = getattr(config, "final_logit_softcapping", None)
    scaling = getattr(config, "logits_scaling", None)
    logit_scale = getattr(config, "logit_scale", None)
    for name, value, neutral, known in (
        ("final_logit_softcapping", softcap, None, _CAPPED),
        ("logits_scaling", scaling, 1.0, _DIVIDED | _MULTIPLIED_BY_SCALING),
        ("logit_scale", logit_scale, 1.0, _MULTIPLIED),
    ):
        if value not in (None, neutral) and model_type not in known:
            raise UnsupportedModelError(
                f"{name} is {value}; expected {neutral} for model type {model_type!r}: packed training computes it "
                f"for {', '.join(sorted(known))}"
            )
    scale = 1.0
    if scaling is not None:
        scale = scaling if model_type in _MULTIPLIED_BY_SCALING else 1 / scaling
    if logit_scale is not None:
        scale *= logit_scale
    return LogitChanges(scale=scale, softcap=softcap)
