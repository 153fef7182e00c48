"""The Megatron-Core backend."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import proxy

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from transformers import AutoConfig

from gcore_trainer.config import ABOVE_ZERO, MegatronConfig, OptimizerConfig, ParallelConfig
from gcore_trainer.errors import ConfigError
from gcore_trainer.lora import LoRAWeights
from gcore_trainer.lora_config import LoRAConfig
from gcore_trainer.megatron.adapters import add_adapters, check_targets, target_layers
from gcore_trainer.megatron.architecture import Architecture, join_groups
from gcore_trainer.megatron.cpu import megatron_runtime
from gcore_trainer.megatron.features import (
    data_parallel_options,
    dispatcher_options,
    fusion_options,
    has_grouped_experts,
    recompute_options,
    uses_transformer_engine,
)
from gcore_trainer.megatron.hf_files import load_weights, num_parameters, save_weights
from gcore_trainer.megatron.model import make_chunks, transformer_config
from gcore_trainer.megatron.optimizer import DistributedAdamW
from gcore_trainer.megatron.pieces import gather_weights, pieces_of
from gcore_trainer.megatron.routing import LayerRouters
from gcore_trainer.objectives.objective import (
    BatchTotals,
    Objective,
    TokenScores,
    add_sums,
    named_scores,
)
from gcore_trainer.packing.head import VocabShard, token_scores
from gcore_trainer.packing.router_replay import Routing
from gcore_trainer.packing.row import Row, make_rows
from gcore_trainer.sample import NOTHING, MicroBatch, filled_up
from gcore_trainer.trainer import Replicas, Trainer

T = TypeVar("T")
_CPU = torch.device("cpu")
_DTYPES = (torch.float32, torch.bfloat16)


class MegatronTrainer(Trainer):
    """Trains a causal LM, or a critic with a value head, divided over the ranks of torch.distributed.

    torch.distributed is initialised, with gloo for a CPU and NCCL for CUDA devices, of which each rank has set its
    own. All trainers of a process have the same layout.

    Args:
        path: a Hugging Face folder with safetensors files, of one of `architecture.MODEL_TYPES`.
        objective: what is minimised. One that looks at values gets a scalar head, which is that of the folder's
            sequence classifier, or zeros where the folder is a causal LM's.
        temperature: divides the logits, as it did at generation.
        dtype: of parameters and activations, float32 or bfloat16; the optimizer's originals are float32.
        megatron: how Megatron-Core computes; None: its defaults.
        share_prefix: compute equal prompts of a micro-batch once; a ring of context parallel ranks does not.
        lora: train adapters of a causal LM's attention and dense MLP, and nothing else; None: all parameters.
        offload: whether the optimizer's originals and moments are in host memory; see `DistributedAdamW`.
        device: None: the current CUDA device, or the CPU where there is none.

    Raises:
        ConfigError: the sizes do not divide the world or the model, or another setting is off.
        UnsupportedModelError: the model has something that is not converted.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> trainer = MegatronTrainer(
        ...     "model", parallel=ParallelConfig(), optimizer=OptimizerConfig(lr=1e-3), objective=SFTObjective()
        ... )
        >>> sample = Sample(prompt_ids=np.array([1, 5]), response_ids=np.array([8, 9, 2]))
        >>> metrics = trainer.train_step([[sample]])
        >>> metrics["sft/loss"] > 0
        True
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        objective: Objective[Any],
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
        megatron: MegatronConfig | None = None,
        share_prefix: bool = True,
        lora: LoRAConfig | None = None,
        offload: bool = False,
        device: torch.device | None = None,
    ) -> None:
        ABOVE_ZERO.require("temperature", temperature)
        if dtype not in _DTYPES:
            raise ConfigError(f"dtype is {dtype}; expected one of {', '.join(map(str, _DTYPES))}")
        if device is None:
            device = (
                torch.device("cuda", torch.cuda.current_device())
                if torch.cuda.is_available()
                else _CPU
            )
        megatron = megatron or MegatronConfig()
        has_te = uses_transformer_engine(
            megatron, device_type=device.type, is_installed=HAVE_TE, has_lora=lora is not None
        )
        if lora is not None and megatron.overlap_param_gather is True:
            raise ConfigError(
                "overlap_param_gather is True with lora; expected false, because Megatron-Core gathers parameters when "
                "their module is called, and adapters have none of their own"
            )
        if lora is not None and objective.scores == "values":
            raise ConfigError(
                f"lora is {lora}; expected None for objective {type(objective).__name__}, which reads values"
            )
        architecture = Architecture(AutoConfig.from_pretrained(path))
        architecture.check_layout(parallel, dist.get_world_size())
        targets = frozenset[str]() if lora is None else target_layers(architecture, lora)
        check_targets(targets, architecture, parallel)
        has_grouped = has_grouped_experts(
            megatron, architecture, device_type=device.type, dtype=dtype
        )
        self._device = device
        self._path = Path(path)
        self._base = str(path)
        # Not itself: a trainer that is dropped is freed at once.
        self._head = proxy(self)
        self._architecture = architecture
        self.temperature = temperature
        self._parallel = parallel
        self._gather = partial(gather_weights, dtype=dtype, device=device)
        self._lora = lora
        self._has_value_head = objective.scores == "values"
        with megatron_runtime(self._device):
            cp = join_groups(parallel, self._device)
            replicas: Any = parallel_state.get_data_parallel_group(with_context_parallel=False)
            features = fusion_options(megatron, device_type=device.type, has_te=has_te)
            features |= recompute_options(
                megatron,
                device_type=device.type,
                num_parameters=partial(num_parameters, self._path),
            )
            features |= dispatcher_options(
                parallel.expert_model_parallel_size, device_type=device.type, dtype=dtype
            )
            config = transformer_config(architecture, parallel, features, dtype=dtype)
            config.finalize_model_grads_func = finalize_model_grads
            stages = make_chunks(
                architecture,
                parallel,
                config,
                has_value_head=self._has_value_head,
                has_grouped_experts=has_grouped,
                has_transformer_engine=has_te,
            )
            self._pieces = self._trained = pieces_of(architecture, parallel, stages)
            load_weights(self._path, self._pieces)
            if lora is not None:
                self._trained = add_adapters(stages, self._pieces, targets, lora)
            overlaps = data_parallel_options(
                megatron,
                device_type=device.type,
                num_ranks=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
                has_lora=lora is not None,
            )
            settings = DistributedDataParallelConfig(**overlaps)
            self._gathers_late = settings.overlap_param_gather
            self._chunks = [
                DistributedDataParallel(config, settings, stage.to(device)) for stage in stages
            ]
            if settings.overlap_grad_reduce:
                no_sync: Any = [chunk.no_sync for chunk in self._chunks]
                config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            self._module = torch.nn.ModuleList(self._chunks)
            adamw = DistributedAdamW(
                optimizer,
                self._chunks,
                self._trained,
                dtype=dtype,
                device=device,
                offload=offload,
            )
            super().__init__(
                config=optimizer, optimizer=adamw, objective=objective, replicas=Replicas(replicas)
            )
            self._routers = LayerRouters(architecture, parallel, stages)
            self.num_routers = self._routers.num_routers
        self._make_rows = partial(
            make_rows,
            cp=cp if cp.size > 1 else None,
            multiple_of=parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1,
            device=device,
            share_prefix=share_prefix,
            replay_routing=not self._has_value_head,
        )

    def sleep(self, *, keep_weights: bool = False) -> None:
        if not any(sleeper.is_asleep for sleeper in self._sleepers[1:]):
            self._finish_param_gather()
        super().sleep(keep_weights=keep_weights)

    def _finish_param_gather(self) -> None:
        """Gather the parameters of the last update unless a forward pass did; afterwards no gather is in flight."""
        if self._gathers_late:
            with megatron_runtime(self._device):
                for chunk in self._chunks:
                    chunk.start_param_sync(force_sync=True)

    def export_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        self._check_awake()
        self._finish_param_gather()
        if self._lora is not None:
            gather = self._gather
            return LoRAWeights(
                lambda: gather(self._pieces), lambda: dict(gather(self._trained)), self._lora
            )
        return self._gather(self._pieces)

    def save_pretrained(self, path: str | Path) -> None:
        save_weights(
            Path(path),
            self._path,
            self._architecture.hf_config,
            self.export_weights(),
            Replicas(dist.group.WORLD),
            is_classifier=self._has_value_head,
        )

    def _backward(
        self, micro_batches: Sequence[MicroBatch], num_passes: int, totals: BatchTotals
    ) -> dict[str, float]:
        sums: dict[str, torch.Tensor] = {}

        def finish(chunk: Any, hidden: torch.Tensor, row: Row) -> tuple[torch.Tensor, None]:
            loss, parts = self._partial_loss(self._scores(chunk, hidden, row), row.samples, totals)
            add_sums(sums, parts)
            return loss, None

        rows = self._rows(micro_batches, num_passes)
        with megatron_runtime(self._device):
            for chunk in self._chunks:
                chunk.train()
                chunk.zero_grad_buffer()
            _run_passes(self._chunks, rows, finish)
        total = _from_last_stage({name: value.item() for name, value in sums.items()})
        return total | {
            "perf/computed_tokens": sum(
                row.num_tokens for row in rows if row.samples is not NOTHING
            )
        }

    @torch.no_grad()
    def _predict(
        self, micro_batches: Sequence[MicroBatch], num_passes: int, routing: Routing | None
    ) -> list[NDArray[np.float32]]:
        def finish(chunk: Any, hidden: torch.Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
            values = named_scores(self._scores(chunk, hidden, row))
            return values.sum(), values

        with megatron_runtime(self._device):
            for chunk in self._chunks:
                chunk.eval()
            rows = self._rows(micro_batches, num_passes)
            self._routers.record(routing is not None)
            results = _run_passes(self._chunks, rows, finish)
            if routing is not None:
                routing += self._routers.take_recorded(rows[: len(micro_batches)])
                self._routers.record(False)
        scores = [values.float().cpu().numpy() for values in results[: len(micro_batches)]]
        return _from_last_stage(scores)

    def _scores(self, chunk: Any, hidden_T1D: torch.Tensor, row: Row) -> Any:
        """Compute `TokenScores`, or values [N], of a row from the last stage's output, the same on all of its ranks."""
        if self._parallel.sequence_parallel:
            # Each rank back-propagates the whole gradient: slices of it are taken, not sums.
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_T1D, tensor_parallel_output_grad=False
            )
        hidden_nD = hidden_T1D[row.source_index, 0]
        if self._has_value_head:
            return row.of_all_ranks(chunk.score(hidden_nD)[:, 0])
        weight_VD = (
            chunk.shared_embedding_or_output_weight()
            if self._architecture.is_tied
            else chunk.output_layer.weight
        )
        if self._gathers_late:
            # Megatron-Core waits for parameters in the forward pass of their module, and the head's is not called.
            group = self._chunks[-1].param_to_bucket_group.get(weight_VD)
            if group is not None:
                group.finish_param_sync()
        tp_group: Any = parallel_state.get_tensor_model_parallel_group()
        scores = token_scores(
            hidden_nD,
            weight_VD,
            row.target_ids,
            temperature=self.temperature,
            entropy_grad=self._objective.entropy_grad,
            kept=row.kept,
            vocab=VocabShard(
                group=tp_group,
                start=parallel_state.get_tensor_model_parallel_rank() * weight_VD.shape[0],
                vocab_size=self._architecture.hf_config.vocab_size,
            ),
        )
        return TokenScores(
            log_probs=row.of_all_ranks(scores.log_probs),
            entropies=row.of_all_ranks(scores.entropies),
        )

    def _rows(self, micro_batches: Sequence[MicroBatch], num_passes: int) -> list[Row]:
        # Also in a step of which no sample has a gradient.
        num_passes = max(1, num_passes)
        is_interleaved = self._parallel.virtual_pipeline_model_parallel_size > 1
        if is_interleaved:
            # That schedule takes groups of as many as there are stages, all of one length.
            num_passes += -num_passes % self._parallel.pipeline_model_parallel_size
        rows = self._make_rows(filled_up(micro_batches, num_passes), equal_lengths=is_interleaved)
        self._routers.check(rows)
        return rows


def _run_passes(
    chunks: Sequence[Any], rows: Sequence[Row], finish: Callable[..., Any]
) -> list[Any]:
    """Run all forward passes, and backward passes if gradients are enabled; return the results on the last stage.

    ``finish`` computes a loss and a result from the last stage, its output and the row.
    """

    def forward_step(rows: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        row: Row = next(rows)
        output = chunk(row.input_ids, row.positions, None, packed_seq_params=row)
        return output, partial(compute_loss, chunk.module, row)

    def compute_loss(
        chunk: Any, row: Row, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        loss, result = finish(chunk, output, row)
        # Of a count of 0 tokens Megatron-Core makes no mean: gradients stay sums.
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), result

    iterator: Any = iter(rows)
    model: Any = chunks[0]
    if len(chunks) > 1:
        iterator = [iter(rows) for _ in chunks]
        model = list(chunks)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterator,
        model=model,
        num_microbatches=len(rows),
        # Of interleaved stages; elsewhere stages send each other the lengths of their messages.
        seq_length=rows[0].num_tokens,
        micro_batch_size=1,
        forward_only=not torch.is_grad_enabled(),
    )


def _from_last_stage(value: T) -> T:
    """Broadcast the last stage's value, which can be pickled, to all stages."""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return value
    box = [value]
    last_rank: Any = parallel_state.get_pipeline_model_parallel_last_rank()
    group: Any = parallel_state.get_pipeline_model_parallel_group()
    dist.broadcast_object_list(box, src=last_rank, group=group)
    return box[0]
