"""verl's functions, which import one name of ray: ray itself is not needed for them, and not installed."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any


def import_verl() -> Any:
    """``get_policy_loss_fn``, ``logprobs_from_logits`` and ``ActorConfig``. For a process of its own."""
    if "ray" not in sys.modules:
        ray = ModuleType("ray")
        ray.__dict__["ObjectRef"] = object
        sys.modules["ray"] = ray
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.torch_functional import logprobs_from_logits
    from verl.workers.config.actor import ActorConfig

    return SimpleNamespace(
        get_policy_loss_fn=get_policy_loss_fn, logprobs_from_logits=logprobs_from_logits, ActorConfig=ActorConfig
    )
