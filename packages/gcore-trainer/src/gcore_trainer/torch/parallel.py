"""The ranks of a torch trainer: FSDP2 over all ranks or a node's, samples over replicas, tokens within a replica."""

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from gcore_trainer.config import ParallelConfig
from gcore_trainer.context_parallel.groups import ContextParallel, make_context_parallel
from gcore_trainer.errors import ConfigError
from gcore_trainer.sample import MicroBatch
from gcore_trainer.torch.packed_model import PackedTransformer

SHARE_OF_GRADIENTS = 0.05
"""Share of a GPU's memory for gradients that wait for an update's last micro-batch."""
REPLICATED_BYTES = 4 << 30
"""Most bytes of weights, gradients and moments of a model that is replicated by default.

It is 268 million trained parameters, or adapters of a billion frozen ones: a twentieth of an H100's memory. Ranks that
share parameters gather them in every pass, and scatter gradients; copies exchange gradients once in an update.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TorchParallel:
    """The groups of this rank. Rank = replica x context_parallel_size + rank in the sequence.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> parallel = TorchParallel.join(ParallelConfig(fsdp_size=1))
        >>> parallel.world_size
        1
        >>> dist.destroy_process_group()
    """

    mesh: DeviceMesh
    """All ranks: parameters and moments are sharded over its last dimension, and equal along the first of two."""
    replicas: dist.ProcessGroup
    """One rank of each replica."""
    context: ContextParallel
    """The ranks that divide this one's rows."""
    gradient_sync: Literal["auto", "update", "micro_batch"] = "micro_batch"
    """When gradients are reduced and scattered; see `ParallelConfig`."""

    @classmethod
    def join(cls, config: ParallelConfig, *, device_type: str = "cpu") -> Self:
        """Make the process groups after torch.distributed is initialised; all ranks call this together.

        Raises:
            ConfigError: the sizes do not divide the world, or are for another backend.
        """
        config.check_torch()
        world_size = dist.get_world_size()
        cp_size = config.context_parallel_size
        dp_size = config.data_parallel_size(world_size)
        grid = init_device_mesh(device_type, (dp_size, cp_size), mesh_dim_names=("dp", "cp"))
        num_shards = config.fsdp_size or world_size
        if num_shards == world_size:
            mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("fsdp",))
        else:
            shape = (world_size // num_shards, num_shards)
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=("ddp", "fsdp"))
        cp_groups = [list(range(first, first + cp_size)) for first in range(0, world_size, cp_size)]
        return cls(
            mesh=mesh,
            replicas=grid["dp"].get_group(),
            context=make_context_parallel(cp_groups, config.ulysses_sequence_parallel_size),
            gradient_sync=config.gradient_sync,
        )

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.mesh.size()

    @property
    def num_shards(self) -> int:
        """Number of ranks that share parameters; 1: each rank has all parameters."""
        return self.mesh.shape[-1]

    def shard(self, packed: PackedTransformer[Any]) -> None:
        """Shard the model's parameters in place, layer by layer (FSDP2, ZeRO-3: arXiv 1910.02054).

        Over a mesh of two dimensions gradients are scattered along the last and then summed along the first (HSDP).

        Raises:
            ConfigError: the attention heads cannot be divided among the Ulysses ranks.
        """
        if packed.num_attention_heads % self.context.ulysses_size:
            raise ConfigError(
                f"ulysses_sequence_parallel_size is {self.context.ulysses_size}; expected a divisor of the model's "
                f"{packed.num_attention_heads} attention heads"
            )
        packed.divide_tokens(self.context)
        # FSDP gathers parameters of one data type together: routers in float32, as ERNIE 4.5's, are gathered apart.
        apart: list[torch.nn.Module] = []
        for module in reversed(list(packed.model.modules())):
            own = list(module.parameters(recurse=False))
            if own and all(parameter.dtype != packed.compute_dtype for parameter in own):
                apart.append(module)
                continue
            for parameter in own:
                parameter.data = parameter.data.to(packed.compute_dtype)
        shard_modules([*apart, *packed.layers(), packed.root], self.mesh)
        packed.load_weights()

    def syncing(
        self, packed: PackedTransformer[Any], passes: Iterable[MicroBatch]
    ) -> Generator[MicroBatch]:
        """Yield an update's micro-batches; their backward passes exchange gradients as ``gradient_sync`` says."""
        waits = self.gradient_sync == "update"
        if self.gradient_sync == "auto":
            waits = fits_whole(packed.model.parameters())
        micro_batches = list(passes)
        for i, samples in enumerate(micro_batches):
            if waits and isinstance(packed.root, FSDPModule):
                packed.root.set_requires_gradient_sync(i + 1 == len(micro_batches))
            yield samples


def shard_modules(
    modules: Sequence[torch.nn.Module], mesh: DeviceMesh, *, dtype: torch.dtype | None = None
) -> None:
    """Shard modules, the outer ones last; ``dtype`` is that of gathered parameters, None: their own.

    Inputs of modules stay as they are: rounded to bfloat16, timesteps and positions would be others. Gradients are
    added up over ranks in float32, or in float64 where parameters are.
    """
    reduce_dtype: torch.dtype | None = torch.float32
    for module in modules:
        if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
            reduce_dtype = None
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    for module in modules:
        fully_shard(module, mesh=mesh, mp_policy=policy)


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace the unsharded gradients of parameters of one data type by their sums over all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    summed = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(summed)
    for gradient, part in zip(gradients, summed.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def should_replicate(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Return whether float32 weights, gradients and moments take `REPLICATED_BYTES` at most."""
    size_bytes = 0
    for parameter in parameters:
        bytes_per_entry = 16 if parameter.requires_grad else 4
        size_bytes += bytes_per_entry * parameter.numel()
    return size_bytes <= REPLICATED_BYTES


def fits_whole(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Return whether float32 gradients of unsharded parameters take at most 5 % of the memory of their GPU."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained or trained[0].device.type != "cuda":
        return False
    memory = torch.cuda.get_device_properties(trained[0].device).total_memory
    return 4 * sum(p.numel() for p in trained) <= SHARE_OF_GRADIENTS * memory
