"""Steps of verl's studies of asynchronous training, on H20."""

from collections.abc import Mapping
from dataclasses import replace

from gcore_bench.placement.oracles.published import PublishedStep, Schedule, Stage, layout_of

_7B = "verl, docs/advance/fully_async.md (2026-02), Qwen2.5-Math-7B, DAPO, responses up to 28k, H20"
_7B_STREAM = _7B + ", on stale responses, whose lengths are others"
_30B = "verl, docs/advance/fully_async.md (2026-02), Qwen3-30B-A3B, GRPO, responses up to 8k, H20"
_ONE_OFF = "verl, docs/advance/one_step_off.md (2025-07), Qwen2.5-Math-7B, DAPO, responses up to 20k, H20"

_COMMON = PublishedStep(
    study=_7B,
    program=_7B,
    model="Qwen2.5 7B",
    device="H20",
    engine=(32, 4),
    training=layout_of("torch", 245_760, cp=4, ranks=32),
    schedule="turns",
    prompts=512,
    ppo_mini_batch_size=32,
    n=16,
    prompt_tokens=150,
    response_tokens=None,
    most_response_tokens=28_672,
    is_even=False,
)
"""The settings that the studies have in common, by their recipes. Prompts are taken to have 150 tokens."""


def _dense(
    engines: int, ranks: int, schedule: Schedule, measured: Mapping[Stage, float], *, fits: tuple[str, ...] = ()
) -> PublishedStep:
    return replace(
        _COMMON,
        study=_7B if schedule == "turns" else _7B_STREAM,
        engine=(engines, 4),
        training=layout_of("torch", 245_760, cp=4, ranks=ranks),
        schedule=schedule,
        old_log_probs=schedule == "turns",
        fits=fits,
        measured=measured,
    )


def _mixture(engines: int, ranks: int, schedule: Schedule, measured: Mapping[Stage, float]) -> PublishedStep:
    turns = schedule == "turns"
    return replace(
        _COMMON,
        study=_30B,
        program=_30B,
        model="Qwen3 30B-A3B",
        engine=(engines, 4),
        training=layout_of("megatron", 20_480, tp=2, cp=2, ep=8, ranks=ranks),
        schedule=schedule,
        ppo_mini_batch_size=128,
        most_response_tokens=8192,
        reference=True,
        old_log_probs=turns,
        # Parameters, gradients and optimizer are on the host between the four updates of a stream's step, too.
        host_moves=1 if turns else 4,
        fits=("experts", "decode_mixture_s", "response_tokens") if turns else (),
        measured=measured,
    )


def _one_off(engines: int, ranks: int, schedule: Schedule, measured: Mapping[Stage, float]) -> PublishedStep:
    return replace(
        _COMMON,
        study=_ONE_OFF,
        program=_ONE_OFF,
        engine=(engines, 2),
        training=layout_of("torch", 180_224, cp=4, ranks=ranks),
        schedule=schedule,
        n=12,
        most_response_tokens=20_480,
        fits=("training", "response_tokens", "sigma") if schedule == "turns" else (),
        measured=measured,
    )


VERL = (
    _dense(
        32,
        32,
        "turns",
        {"generation": 357.41, "preparation": 107.71, "training": 269.8, "step": 790.1},
        fits=("training", "response_tokens", "sigma"),
    ),
    _dense(64, 64, "turns", {"generation": 150.72, "preparation": 70.26, "training": 133.41, "step": 365.28}),
    _dense(128, 128, "turns", {"generation": 177.85, "preparation": 53.92, "training": 113.81, "step": 356.3}),
    _dense(16, 16, "stale stream", {"training": 313.81, "step": 294.77}, fits=("response_tokens",)),
    _dense(32, 32, "stale stream", {"training": 156.98, "step": 189.26}),
    _dense(64, 64, "stale stream", {"training": 113.16, "step": 150.63}),
    _dense(64, 64, "stream", {"training": 98.77, "step": 231.34}),
    _mixture(128, 128, "turns", {"generation": 348.05, "preparation": 49.59, "training": 86.27, "step": 497.89}),
    _mixture(96, 32, "stale stream", {"preparation": 50.05, "training": 206.63, "step": 282.75}),
    _one_off(16, 16, "turns", {"generation": 321.0, "preparation": 88.0, "training": 286.0, "step": 749.0}),
    _one_off(4, 12, "one step off", {"generation": 458.0, "preparation": 108.0, "training": 337.0, "step": 520.0}),
)
"""The steps."""
