"""The one correction that TRL needs here: new weights for vLLM's packed CPU kernels."""

from typing import Any

import torch
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def make_sync_correct(generation: Any) -> None:
    """Let a `VLLMGeneration` reload weights through vLLM's own `reload_weights`, which packs them again.

    As published it calls ``load_weights`` on the model: on CPU vLLM has by then replaced the parameters by copies
    packed for its matrix products, which that function cannot load (AttributeError: no ``weight_loader``).
    """

    def sync_weights() -> None:
        weights = [(name, p.detach()) for name, p in generation.model.named_parameters() if name != "lm_head.weight"]
        generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        generation.llm.apply_model(_repack_head)
        generation.llm.reset_prefix_cache()

    generation.sync_weights = sync_weights


def _repack_head(model: torch.nn.Module) -> None:
    """A tied head's packed weight is not among those that `reload_weights` renews."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)
