"""A stand-in for DeepEP's exchange of tokens, which cannot be installed without CUDA.

It is written from what Megatron-Core's flexible dispatcher passes to DeepEP and takes from it: a token goes once to
each rank that has one of its experts, with its choices there, and what comes back of it is added up. It shows that the
model, its experts and router replay work with that dispatcher, and nothing of DeepEP itself.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe import token_dispatcher

from gcore_trainer.megatron import trainer


def dispatch(
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    probs_TK: torch.Tensor,
    num_experts: int,
    group: Any,
    **options: bool,
) -> tuple[Any, ...]:
    """Return tokens, choices, probabilities, tokens of each expert, and the handle of `combine`."""
    del options
    num_local = num_experts // group.size()
    ranks_TK = experts_TK // num_local
    tokens: list[torch.Tensor] = []
    choices: list[torch.Tensor] = []
    weights: list[torch.Tensor] = []
    for rank in range(group.size()):
        is_there = ranks_TK == rank
        rows = is_there.any(1).nonzero()[:, 0]
        tokens.append(rows)
        choices.append(torch.where(is_there, experts_TK % num_local, -1)[rows])
        weights.append(torch.where(is_there, probs_TK, 0.0)[rows])
    sent = torch.tensor([len(rows) for rows in tokens])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    rows = torch.cat(tokens)
    splits = received.tolist(), sent.tolist()
    own_choices = all_to_all(group, torch.cat(choices), *splits)
    counts = torch.bincount(own_choices[own_choices >= 0], minlength=num_local)
    return (
        all_to_all(group, x_TD[rows], *splits),
        own_choices,
        all_to_all(group, torch.cat(weights), *splits),
        counts,
        (rows, x_TD.shape, splits),
    )


def combine(
    x_ND: torch.Tensor, group: Any, handle: tuple[Any, ...], **options: bool
) -> tuple[torch.Tensor, None]:
    del options
    rows, shape, (received, sent) = handle
    returned = all_to_all(group, x_ND, sent, received)
    return x_ND.new_zeros(shape).index_add(0, rows, returned), None


@contextmanager
def deepep_stand_in() -> Generator[None]:
    """Trainers that are made here exchange tokens so, as long as they live."""
    names: Any = token_dispatcher
    names.fused_dispatch = dispatch
    names.fused_combine = combine
    names.set_deepep_num_sms = mock.Mock()
    options = {"moe_token_dispatcher_type": "flex"}
    with mock.patch.object(trainer, "dispatcher_options", return_value=options):
        yield
    assert names.set_deepep_num_sms.called, "no layer has the dispatcher"
