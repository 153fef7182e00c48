"""The planner's memory against published numbers, each with its source, and what the laws lack of it.

``pytest -s`` prints the table with the errors.

Not compared, because the laws do not describe them: FSDP2 and tensor parallelism together, float8, selective activation
checkpointing by operation, and pipelines whose gradients are sharded (tables 1, 3, 4, 5 and 6 of torchtitan's page).
"""

from dataclasses import dataclass
from typing import Any

import pytest

from gcore_placement import (
    Cluster,
    Device,
    Efficiency,
    Job,
    Lengths,
    ModelShape,
    TrainingLayout,
    TrainingState,
)
from gcore_placement.planning.layouts import Backend, TrainingLayouts
from gcore_placement.planning.memory import parts_at, training_memory
from gcore_placement.planning.options import EngineRoofline

GIB = 2**30
ZERO = "Rajbhandari et al. 2019, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 GPUs, fp16 gradients"
MEGATRON = "Megatron-Core's guide, distributed optimizer: bf16 parameters, fp32 gradients"
ANATOMY = (
    "transformers' docs, model training anatomy: AdamW in mixed precision, 18 bytes a parameter"
)
VLLM = "Kwon et al. 2023, arXiv 2309.06180, table 1: slots of keys and values in the memory left to them"
TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 2: Llama 3.1 8B, full checkpointing, measured"

LLAMA_2_7B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32_000,
}
LLAMA_31_8B: dict[str, Any] = {
    **LLAMA_2_7B,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}
STATE = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published number and the planner's."""

    what: str
    published: float
    planned: float
    tolerance: float
    """Largest error that is accepted, as a share of the published number."""
    source: str
    reason: str = ""
    """Why the planner's differs."""

    @property
    def error(self) -> float:
        return self.planned / self.published - 1


def opt(hidden_size: int, num_layers: int, num_heads: int) -> ModelShape:
    """OPT's widths, as far as keys and values go."""
    config = {
        **LLAMA_2_7B,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }
    return ModelShape.from_config(config)


def memory_of(
    model: ModelShape, *, backend: Backend, dp: int, cp: int = 1, length: int = 2048, **state: Any
) -> dict[str, float]:
    """The parts of a device's memory in training on one sequence of this length a replica."""
    job = Job(
        policy=model,
        prompt_lengths=Lengths.recorded([1]),
        response_lengths=Lengths.recorded([length - 1]),
        train_batch_size=dp,
        n=1,
    )
    layout = TrainingLayout(
        backend=backend,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=cp,
        data_parallel_size=dp,
        gradient_checkpointing=True,
        ppo_max_token_len=length,
    )
    return parts_at(
        training_memory(
            job,
            TrainingLayouts(layout),
            activations=Efficiency().activations,
            state=TrainingState(**state),
        ),
        0,
    )


def state_bytes(model: ModelShape, *, backend: Backend, dp: int) -> float:
    """Bytes of a parameter on a device: weights, gradients and optimizer."""
    parts = memory_of(model, backend=backend, dp=dp)
    return sum(parts[name] for name in STATE) / model.num_parameters


def slots(model: ModelShape, free_gib: float, tp: int) -> float:
    """Tokens whose keys and values fit in the memory of all devices."""
    roofline = EngineRoofline(
        model=model,
        cluster=Cluster(num_devices=8, device=Device.named("A100")),
        tp=tp,
        compute_bytes=2,
        efficiency=Efficiency(),
    )
    return free_gib * GIB / tp / roofline.kv_token_bytes


def rows() -> list[Row]:
    llama, titan = ModelShape.from_config(LLAMA_2_7B), ModelShape.from_config(LLAMA_31_8B)
    found = [
        Row(
            what="GB of states, ZeRO-3 (P_os+g+p)",
            published=1.9,
            planned=7.5 * state_bytes(llama, backend="torch", dp=64),
            tolerance=0.15,
            source=ZERO,
            reason="gradients are float32 here: 18 bytes a parameter, not 16",
        ),
        Row(
            what="GB of states, ZeRO-1 (P_os)",
            published=31.4,
            planned=7.5 * state_bytes(llama, backend="megatron", dp=64),
            tolerance=0.5,
            source=ZERO,
            reason="gradients are float32 here: 15 GB more, on every rank",
        ),
        *(
            Row(
                what=f"bytes a parameter, ZeRO-1 on {dp} ranks",
                published=6 + 12 / dp,
                planned=state_bytes(llama, backend="megatron", dp=dp),
                tolerance=1e-3,
                source=MEGATRON,
            )
            for dp in (1, 8)
        ),
        Row(
            what="bytes a parameter on one GPU",
            published=18,
            planned=state_bytes(llama, backend="torch", dp=1),
            tolerance=1e-3,
            source=ANATOMY,
        ),
        *(
            Row(
                what=f"slots, OPT-{name}",
                published=count,
                planned=slots(model, gib, tp),
                tolerance=0.02,
                source=VLLM,
            )
            for name, model, gib, tp, count in (
                ("13B", opt(5120, 40, 40), 12, 1, 15_700),
                ("66B", opt(9216, 64, 72), 21, 4, 9_700),
                ("175B", opt(12_288, 96, 96), 264, 8, 60_100),
            )
        ),
    ]
    for dp, cp, length, measured in (
        (8, 1, 32_768, 83.9),
        (4, 2, 65_536, 84.2),
        (2, 4, 131_072, 84.0),
    ):
        # It keeps all logits of a rank, where the trainer here has a chunk of them.
        parts = memory_of(titan, backend="torch", dp=dp, cp=cp, length=length, max_logits=1 << 40)
        found.append(
            Row(
                what=f"GiB of a GPU, FSDP {dp} CP {cp}, {length:,} tokens",
                published=measured,
                planned=sum(parts.values()) / GIB,
                tolerance=0.2,
                source=TITAN,
                reason="linear layers in float8 and torch.compile there; the law's copies of logits and its 18 bytes",
            )
        )
    return found


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.what)
def test_planned_memory_is_near_what_was_published(row: Row) -> None:
    print(
        f"{row.what:45} {row.published:12,.1f} {row.planned:12,.1f} {row.error:+7.1%}  {row.source}"
    )
    assert abs(row.error) <= row.tolerance, row.reason
