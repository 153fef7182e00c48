"""Router replay in Megatron-Core: see `gcore_trainer.packing.router_replay`."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from numpy.typing import NDArray

from gcore_trainer.config import ParallelConfig
from gcore_trainer.megatron.architecture import Architecture
from gcore_trainer.packing.router_replay import ReplayedRouter, check_routing
from gcore_trainer.packing.row import Row


class LayerRouters:
    """The routers of this rank's layers. All layers have experts, or none."""

    def __init__(
        self, architecture: Architecture, parallel: ParallelConfig, stages: Sequence[Any]
    ) -> None:
        self.num_routers = 0
        self._top_k = 0
        self._is_sliced = parallel.sequence_parallel and parallel.tensor_model_parallel_size > 1
        self._routers: dict[int, ReplayedRouter] = {}
        if not architecture.num_experts:
            return
        self.num_routers = architecture.num_layers
        self._top_k = architecture.hf_config.num_experts_per_tok
        for layer in chain.from_iterable(stage.decoder.layers for stage in stages):
            router: TopKRouter = layer.mlp.router
            replayed = ReplayedRouter(
                router, num_experts=architecture.num_experts, top_k=self._top_k
            )
            self._routers[int(layer.layer_number) - 1] = replayed
            # A layer that is computed again in the backward pass is called again, with its own row.
            layer.register_forward_pre_hook(self._impose, with_kwargs=True)

    def check(self, rows: Sequence[Row]) -> None:
        """Raise `BatchError` for a row whose routing is of another model."""
        for row in rows:
            if row.routing is not None:
                check_routing(row.routing, (self.num_routers, self._top_k))

    def record(self, is_recording: bool) -> None:
        """Record the passes from now on, or stop."""
        for router in self._routers.values():
            router.recorded = [] if is_recording else None

    def take_recorded(self, rows: Sequence[Row]) -> list[list[NDArray[np.int16]]]:
        """Return [num_inputs, L, K] of each sample of the recorded passes, the same on all ranks of the replica."""
        return [row.of_samples(self._gather_stages(i, row)) for i, row in enumerate(rows)]

    def _impose(self, layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
        del args
        row: Row = kwargs["packed_seq_params"]
        index = int(layer.layer_number) - 1
        routing_TK = None
        if row.routing is not None:
            routing_TK = self._own_tokens(row.routing)[:, index]
        self._routers[index].imposed = routing_TK

    def _own_tokens(self, routing_TLK: torch.Tensor) -> torch.Tensor:
        """Return a view of the tokens that this rank's routers get: with sequence parallelism a part of the row's."""
        if not self._is_sliced:
            return routing_TLK
        size = parallel_state.get_tensor_model_parallel_world_size()
        return routing_TLK.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]

    def _gather_stages(self, number: int, row: Row) -> torch.Tensor:
        """Gather the choices [T, L, K] of one pass from all stages."""
        num_tokens = row.input_ids.shape[1]
        groups = [parallel_state.get_pipeline_model_parallel_group()]
        routing = torch.zeros(
            num_tokens,
            self.num_routers,
            self._top_k,
            dtype=torch.int64,
            device=row.input_ids.device,
        )
        if self._is_sliced:
            groups.append(parallel_state.get_tensor_model_parallel_group())
        for layer, router in self._routers.items():
            assert router.recorded is not None
            self._own_tokens(routing)[:, layer] = router.recorded[number]
        group: Any
        for group in groups:
            dist.all_reduce(routing, group=group)
        return routing
