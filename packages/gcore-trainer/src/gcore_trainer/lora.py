"""Low-rank adapters in the place of full fine-tuning: W + (alpha / rank) B A; B and A learn (arXiv 2106.09685)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gcore_trainer.config import LoRAConfig
from gcore_trainer.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import torch

_A, _B, _BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer."


def add_lora(model: Any, config: LoRAConfig, *, seed: int = 0) -> None:
    """Put adapters beside a transformers model's linear layers, by peft, and freeze all else.

    B begins at 0, so that the model computes what it did; A is drawn from the seed, the same on every rank.

    Raises:
        ConfigError: the model has no such layers.
        MissingExtraError: peft is not installed.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtraError("peft", "lora") from None
    import torch

    names = config.target_modules
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules="all-linear" if names == ("all-linear",) else list(names),
        lora_dropout=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ConfigError(f"target_modules is {names}: {error}") from None


def merged(
    parameters: Iterable[tuple[str, "torch.Tensor"]], adapters: Mapping[str, "torch.Tensor"], config: LoRAConfig
) -> Iterator[tuple[str, "torch.Tensor"]]:
    """Hugging Face names and weights with the adapters in them, one at a time.

    Args:
        parameters: names and whole tensors of a model; its adapters, if they are among them, are left out.
        adapters: names and whole tensors of the adapters; all are used.
        config: what they were made with.
    """
    scale = config.alpha / config.rank
    for name, tensor in parameters:
        if name.endswith((_A, _B)):
            continue
        plain = name.replace(_BASE, ".")
        layer, _, kind = plain.rpartition(".")
        if kind == "weight" and layer + _A in adapters:
            a, b = (adapters[layer + end].to(tensor) for end in (_A, _B))
            yield plain, tensor + scale * (b @ a)
        else:
            yield plain, tensor
