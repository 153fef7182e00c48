"""Router replay: the experts of each token are recorded in one pass and imposed on later ones.

A mixture of experts whose routers choose again in every pass makes ratios to old log-probs jump where nothing was
learned: near a tie, rounding decides. "Routing Replay" of GSPO, arXiv 2507.18071, section 5.3; verl's ``R2`` records in
the trainer's pass for the old log-probs. Its ``R3`` imposes the experts of the engine, so that engine and trainer do
not differ by them either: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference
Routers", arXiv 2510.11370. With the mask I of the recorded experts, and logits s of the present pass, expert i has the
weight ``I[i] exp(s[i]) / sum over j of I[j] exp(s[j])``, through which routers get their gradient.

Shapes: T tokens of a rank's row, L layers with experts, K experts a token, E experts of a layer.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from gcore_trainer.errors import BatchError, UnsupportedModelError
from gcore_trainer.packing.layout import PackedBatch
from gcore_trainer.sample import MicroBatch

Routing = list[list[NDArray[np.int16]]]
"""Experts [num_inputs, L, K] of each sample of each micro-batch."""


class ReplayedRouter(TorchFunctionMode):
    """A router whose choice can be recorded and imposed; within its forward pass, a mode of torch's functions.

    Every router scores all experts and takes ``torch.topk`` of the scores. Replay is the router's own computation with
    other indices there: weights, their normalisation and their gradient are as they would be had it chosen these.
    """

    def __init__(self, router: torch.nn.Module, *, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.imposed: torch.Tensor | None = None
        """[T, K] choice of the next passes; negative, or None: the router chooses."""
        self.recorded: list[torch.Tensor] | None = None
        """[T, K] of every pass, while it is a list."""
        self.num_experts = num_experts
        self.top_k = top_k
        self._chosen: torch.Tensor | None = None
        self._name = type(router).__name__
        self._forward = router.forward
        router.forward = self._run_forward

    def _run_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.imposed is None and self.recorded is None:
            return self._forward(*args, **kwargs)
        self._chosen = None
        with self:
            result = self._forward(*args, **kwargs)
        if self._chosen is None:
            raise UnsupportedModelError(
                f"{self._name} did not choose {self.top_k} of {self.num_experts} experts by torch.topk: "
                "router replay needs it to"
            )
        if self.recorded is not None:
            self.recorded.append(self._chosen)
        self._chosen = None
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or not self._is_choice(*args, **kwargs):
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.imposed is not None:
            indices = torch.where(self.imposed < 0, result.indices, self.imposed)
            result = torch.return_types.topk((args[0].gather(-1, indices), indices))  # pyright: ignore[reportAttributeAccessIssue]
        self._chosen = result.indices
        return result

    def _is_choice(self, scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> bool:
        """Return whether a top k chooses the experts: some routers choose groups of experts before."""
        del args, kwargs
        return k == self.top_k and scores.shape[-1] == self.num_experts


def routing_of_row(samples: MicroBatch, batch: PackedBatch) -> NDArray[np.int64]:
    """Return the experts [T, L, K] of each token of a packed row; -1 where no sample has any, as of padding.

    A shared prompt has those of its first sample that has any.
    """
    recorded = [s.routed_experts for s in samples if s.routed_experts is not None]
    shapes: set[tuple[int, ...] | None] = {experts.shape[1:] for experts in recorded}
    if len(recorded) < len(samples):
        shapes.add(None)
    if len(shapes) > 1:
        raise BatchError(
            f"routed_experts of a micro-batch have layers and experts {sorted(shapes, key=str)}; expected the same"
        )
    routing = np.full((batch.input_ids.size, *recorded[0].shape[1:]), -1, np.int64)
    for experts, index in zip(recorded, batch.input_places(samples), strict=True):
        routing[index] = np.where(routing[index] < 0, experts, routing[index])
    return routing


def check_routing(routing: torch.Tensor, expected: tuple[int, ...]) -> None:
    """Raise `BatchError` unless a routing [T, L, K] has the ``expected`` layers and experts."""
    if tuple(routing.shape[1:]) != expected:
        raise BatchError(
            f"routed_experts has layers and experts {tuple(routing.shape[1:])}: the model has {expected}"
        )
