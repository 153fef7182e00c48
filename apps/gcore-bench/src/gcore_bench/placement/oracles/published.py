"""Steps of other systems, as their reports have them: what was run, and the seconds that were measured."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gcore_placement import TrainingLayout
from gcore_placement.planning.layouts import Backend

Schedule = Literal["turns", "one step off", "stream", "stale stream"]
Stage = Literal["generation", "preparation", "training", "step"]

_NEMO = "NeMo-RL 0.4, docs/about/performance-summary.md, GRPO on OpenMathInstruct-2, H100"
_VERL_7B = "verl, docs/advance/fully_async.md (2026-02), Qwen2.5-Math-7B, DAPO, responses up to 28k, H20"
_VERL_7B_STREAM = _VERL_7B + ", on stale responses, whose lengths are others"
_VERL_30B = "verl, docs/advance/fully_async.md (2026-02), Qwen3-30B-A3B, GRPO, responses up to 8k, H20"
_VERL_ONE_OFF = "verl, docs/advance/one_step_off.md (2025-07), Qwen2.5-Math-7B, DAPO, responses up to 20k, H20"

CONFIGS: dict[str, dict[str, object]] = {
    "Llama 3.1 8B": {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "Qwen2.5 7B": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    },
    "Qwen3 32B": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "Qwen3 30B-A3B": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
    "Qwen3 235B-A22B": {
        "model_type": "qwen3_moe",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151_936,
    },
}
"""The keys of each model's config.json that the laws read."""


@dataclass(frozen=True, kw_only=True)
class PublishedStep:
    """A row of a report."""

    study: str
    """Its source."""
    model: str
    """One of CONFIGS."""
    device: str
    engine: tuple[int, int]
    """Devices that generate, and those of each engine."""
    training: TrainingLayout
    schedule: Schedule
    """turns: all devices generate, then train. The others train on devices of their own: one step off, on responses
    of the step before; stream, on those of this step as they come, in four updates of which each has a quarter; stale
    stream: as stream, but sampling is never waited for, and responses go over to the next step."""
    prompts: int
    n: int
    prompt_tokens: float
    response_tokens: float | None
    """Mean; None where the report has none."""
    most_response_tokens: int
    reference: bool = False
    old_log_probs: bool = True
    fits: tuple[str, ...] = ()
    """Names of the constants that are fitted to the study's steps that have any; the others are predicted. Fields of
    `Efficiency`, and response_tokens and sigma, the mean of responses and the deviation of their logarithms."""
    measured: Mapping[Stage, float] = field(default_factory=dict[Stage, float])
    """Seconds."""

    @property
    def name(self) -> str:
        """The model, the devices and the schedule, as text."""
        engines, ranks = self.engine[0], self.training.num_ranks
        devices = f"{ranks}" if self.schedule == "turns" else f"{engines} + {ranks}"
        return f"{self.model} on {devices}, {self.schedule}"


def _layout(
    backend: Backend, tokens: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, ranks: int
) -> TrainingLayout:
    return TrainingLayout(
        backend=backend,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        data_parallel_size=ranks // (tp * cp * pp),
        gradient_checkpointing=True,
        ppo_max_token_len=tokens,
    )


def _nemo(
    model: str, engine: tuple[int, int], sizes: tuple[int, int, int, int], lengths: tuple[int, int], step_s: float,
    *, off: bool = False, prompts: int = 64, most: int = 4096, fits: tuple[str, ...] = (),
) -> PublishedStep:  # fmt: skip
    tp, cp, ep, pp = sizes
    return PublishedStep(
        study=_NEMO,
        model=model,
        device="H100",
        engine=engine,
        training=_layout("megatron", most, tp=tp, cp=cp, ep=ep, pp=pp, ranks=engine[0]),
        schedule="one step off" if off else "turns",
        prompts=prompts,
        n=32,
        prompt_tokens=lengths[0],
        response_tokens=lengths[1],
        most_response_tokens=most - lengths[0],
        reference=True,
        fits=fits,
        measured={"step": step_s},
    )


_VERL = PublishedStep(
    study=_VERL_7B,
    model="Qwen2.5 7B",
    device="H20",
    engine=(32, 4),
    training=_layout("torch", 61_440, cp=4, ranks=32),
    schedule="turns",
    prompts=512,
    n=16,
    prompt_tokens=150,
    response_tokens=None,
    most_response_tokens=28_672,
)
"""The settings that verl's studies have in common."""


def _verl_7b(
    engines: int, ranks: int, schedule: Schedule, measured: Mapping[Stage, float], *, fits: tuple[str, ...] = ()
) -> PublishedStep:
    return replace(
        _VERL,
        study=_VERL_7B if schedule == "turns" else _VERL_7B_STREAM,
        engine=(engines, 4),
        training=_layout("torch", 61_440, cp=4, ranks=ranks),
        schedule=schedule,
        old_log_probs=schedule == "turns",
        fits=fits,
        measured=measured,
    )


def _verl_30b(engines: int, ranks: int, schedule: Schedule, measured: Mapping[Stage, float]) -> PublishedStep:
    return replace(
        _VERL,
        study=_VERL_30B,
        model="Qwen3 30B-A3B",
        engine=(engines, 4),
        training=_layout("megatron", 10_240, tp=2, cp=2, ep=8, ranks=ranks),
        schedule=schedule,
        most_response_tokens=8192,
        reference=True,
        old_log_probs=schedule == "turns",
        fits=("experts", "decode_mixture_s", "response_tokens") if schedule == "turns" else (),
        measured=measured,
    )


def _verl_one_off(engines: int, ranks: int, schedule: Schedule, measured: Mapping[Stage, float]) -> PublishedStep:
    return replace(
        _VERL,
        study=_VERL_ONE_OFF,
        engine=(engines, 2),
        training=_layout("torch", 45_056, cp=4, ranks=ranks),
        schedule=schedule,
        most_response_tokens=20_480,
        fits=("training", "response_tokens", "sigma") if schedule == "turns" else (),
        measured=measured,
    )


PUBLISHED = (
    _nemo("Llama 3.1 8B", (16, 1), (1, 1, 1, 2), (132, 1060), 97.7),
    _nemo("Llama 3.1 8B", (8, 1), (1, 1, 1, 2), (132, 1129), 74.6, off=True),
    _nemo("Qwen3 32B", (32, 4), (4, 1, 1, 4), (110, 3206), 393.0),
    _nemo("Qwen3 32B", (32, 4), (4, 1, 1, 4), (110, 3207), 215.0, off=True),
    _nemo("Qwen3 30B-A3B", (32, 4), (2, 1, 8, 1), (98, 3154), 225.0, fits=("experts",)),
    _nemo("Qwen3 30B-A3B", (16, 2), (1, 1, 8, 2), (98, 3158), 244.0, off=True),
    _nemo("Qwen3 235B-A22B", (128, 16), (2, 2, 16, 8), (110, 5671), 506.0, prompts=16, most=8192),
    _nemo(
        "Qwen3 235B-A22B",
        (128, 8),
        (4, 1, 16, 8),
        (110, 5691),
        241.0,
        off=True,
        prompts=16,
        most=8192,
        fits=("decode_mixture_s",),
    ),
    _verl_7b(
        32,
        32,
        "turns",
        {"generation": 357.41, "preparation": 107.71, "training": 269.8, "step": 790.1},
        fits=("training", "response_tokens", "sigma"),
    ),
    _verl_7b(64, 64, "turns", {"generation": 150.72, "preparation": 70.26, "training": 133.41, "step": 365.28}),
    _verl_7b(128, 128, "turns", {"generation": 177.85, "preparation": 53.92, "training": 113.81, "step": 356.3}),
    _verl_7b(16, 16, "stale stream", {"training": 313.81, "step": 294.77}, fits=("response_tokens",)),
    _verl_7b(32, 32, "stale stream", {"training": 156.98, "step": 189.26}),
    _verl_7b(64, 64, "stale stream", {"training": 113.16, "step": 150.63}),
    _verl_7b(64, 64, "stream", {"training": 98.77, "step": 231.34}),
    _verl_30b(128, 128, "turns", {"generation": 348.05, "preparation": 49.59, "training": 86.27, "step": 497.89}),
    _verl_30b(96, 32, "stale stream", {"preparation": 50.05, "training": 206.63, "step": 282.75}),
    _verl_one_off(16, 16, "turns", {"generation": 321.0, "preparation": 88.0, "training": 286.0, "step": 749.0}),
    _verl_one_off(4, 12, "one step off", {"generation": 458.0, "preparation": 108.0, "training": 337.0, "step": 520.0}),
)
"""The steps. Layouts are those of the recipes that the reports name; prompts of verl's runs are taken to have 150
tokens, and NeMo-RL's the difference between trained and generated tokens. Of mixtures, the step off of 235B, which
generation takes, and the turns of 30B, half of which is training, tell their two constants apart."""
