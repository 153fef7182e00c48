"""Steps of NeMo-RL's performance summaries: GRPO on OpenMathInstruct-2, on and one step off policy, in bfloat16."""

from gcore_bench.placement.oracles.published import PublishedStep, Schedule, layout_of

_SOURCE = "NeMo-RL {version}, docs/about/performance-summary.md, GRPO on OpenMathInstruct-2"
_PROMPT_TOKENS = 120
"""Mean of a prompt, which no table has; tokens a second count prompts, too, and most rows' are of 97 to 160."""
_N = {"DeepSeek-V3": 16}
_MOST_TOKENS = {"DeepSeek-V3": 1536, "Qwen3 235B-A22B": 8192}
_FITS = {
    ("0.4", "H100", "Qwen3 30B-A3B", "turns"): ("experts",),
    ("0.4", "H100", "Qwen3 235B-A22B", "one step off"): ("decode_mixture_s",),
    ("0.5", "H100", "Qwen3 30B-A3B", "turns"): ("experts",),
    ("0.5", "GB200", "Qwen3 32B", "one step off"): ("training",),
    ("0.5", "GB200", "Llama 3.1 8B", "turns"): ("decode_step_s",),
    ("0.5", "GB200", "Qwen3 30B-A3B", "turns"): ("experts",),
    ("0.5", "GB200", "Qwen3 235B-A22B", "turns"): ("decode_mixture_s",),
}
"""Rows to which a constant is fitted. Of mixtures, the step off of 235B, which generation takes, and the turns of 30B,
half of which is training, tell their two constants apart. Experts train faster from 0.5 on. A GB200 has constants of
its own, also for dense models: the step off of 32B is training, and the turns of 8B then tell what a decoding step
adds."""

_ROWS: tuple[tuple[str, str, str, Schedule, int, int, tuple[int, int, int, int], int, float, float], ...] = (
    # Release, device, model, schedule, devices that generate, of each engine, (TP, CP, EP, PP) of training,
    # mean response tokens, tokens a second on each device, seconds of a step.
    ("0.4", "H100", "Llama 3.1 8B", "turns", 16, 1, (1, 1, 1, 2), 1060, 1562, 97.7),
    ("0.4", "H100", "Llama 3.1 8B", "one step off", 8, 1, (1, 1, 1, 2), 1129, 2161, 74.6),
    ("0.4", "H100", "Qwen3 32B", "turns", 32, 4, (4, 1, 1, 4), 3206, 540, 393.0),
    ("0.4", "H100", "Qwen3 32B", "one step off", 32, 4, (4, 1, 1, 4), 3207, 494, 215.0),
    ("0.4", "H100", "Qwen3 30B-A3B", "turns", 32, 4, (2, 1, 8, 1), 3154, 925, 225.0),
    ("0.4", "H100", "Qwen3 30B-A3B", "one step off", 16, 2, (1, 1, 8, 2), 3158, 864, 244.0),
    ("0.4", "H100", "Qwen3 235B-A22B", "turns", 128, 16, (2, 2, 16, 8), 5671, 45.7, 506.0),
    ("0.4", "H100", "Qwen3 235B-A22B", "one step off", 128, 8, (4, 1, 16, 8), 5691, 52.2, 241.0),
    ("0.4", "H100", "DeepSeek-V3", "turns", 256, 32, (1, 1, 16, 16), 745, 11, 154.0),
    ("0.4", "H100", "DeepSeek-V3", "one step off", 256, 32, (1, 1, 16, 16), 744, 11.0, 77.9),
    ("0.5", "H100", "Llama 3.1 8B", "turns", 16, 1, (1, 1, 1, 2), 1019, 1581, 92.8),
    ("0.5", "H100", "Llama 3.1 8B", "one step off", 8, 1, (1, 1, 1, 1), 1123, 2478, 64.8),
    ("0.5", "H100", "Qwen3 32B", "turns", 32, 4, (4, 1, 1, 4), 3251, 571, 376.0),
    ("0.5", "H100", "Qwen3 32B", "one step off", 32, 4, (4, 1, 1, 4), 3252, 538, 200.0),
    ("0.5", "H100", "Qwen3 30B-A3B", "turns", 32, 2, (1, 1, 8, 1), 3196, 1066, 198.0),
    ("0.5", "H100", "Qwen3 30B-A3B", "one step off", 16, 2, (1, 1, 8, 2), 3201, 1391, 154.0),
    ("0.5", "H100", "Qwen3 235B-A22B", "turns", 128, 16, (2, 2, 16, 8), 5700, 54.1, 431.0),
    ("0.5", "H100", "Qwen3 235B-A22B", "one step off", 128, 8, (4, 1, 16, 8), 5707, 58.7, 203.0),
    ("0.5", "H100", "DeepSeek-V3", "turns", 256, 32, (1, 1, 16, 16), 744, 12.7, 134.0),
    ("0.5", "H100", "DeepSeek-V3", "one step off", 256, 32, (1, 1, 16, 16), 738, 13.1, 64.9),
    ("0.5", "GB200", "Llama 3.1 8B", "turns", 8, 1, (1, 1, 1, 1), 1066, 3359, 91.0),
    ("0.5", "GB200", "Llama 3.1 8B", "one step off", 4, 1, (1, 1, 1, 1), 1107, 4463, 71.1),
    ("0.5", "GB200", "Qwen3 32B", "turns", 16, 1, (2, 1, 1, 1), 3253, 1127, 381.0),
    ("0.5", "GB200", "Qwen3 32B", "one step off", 16, 1, (2, 1, 1, 1), 3258, 1025, 210.0),
    ("0.5", "GB200", "Qwen3 30B-A3B", "turns", 16, 1, (1, 1, 16, 1), 3198, 1822, 232.0),
    ("0.5", "GB200", "Qwen3 30B-A3B", "one step off", 16, 1, (1, 1, 16, 1), 3204, 1558, 136.0),
    ("0.5", "GB200", "Qwen3 235B-A22B", "turns", 64, 8, (2, 2, 16, 4), 5711, 140, 332.0),
    ("0.5", "GB200", "Qwen3 235B-A22B", "one step off", 64, 8, (4, 1, 16, 4), 5711, 87.9, 268.0),
    ("0.5", "GB200", "DeepSeek-V3", "turns", 128, 32, (1, 1, 16, 8), 996, 34.3, 128.0),
    ("0.5", "GB200", "DeepSeek-V3", "one step off", 128, 16, (1, 1, 16, 8), 994, 31.7, 64.5),
    ("0.6", "H100", "Qwen3 30B-A3B", "turns", 32, 2, (1, 1, 8, 1), 3203, 1102, 192.0),
    ("0.6", "H100", "Qwen3 30B-A3B", "one step off", 16, 2, (1, 1, 8, 2), 3201, 1414, 152.0),
    ("0.6", "H100", "Qwen3 235B-A22B", "turns", 128, 16, (2, 2, 16, 8), 5698, 58.9, 395.0),
    ("0.6", "H100", "Qwen3 235B-A22B", "turns", 256, 16, (2, 2, 16, 8), 5713, 37.4, 312.0),
    ("0.6", "H100", "Qwen3 235B-A22B", "one step off", 128, 8, (4, 1, 16, 8), 5721, 58.7, 231.0),
    ("0.6", "H100", "DeepSeek-V3", "turns", 256, 32, (1, 1, 16, 16), 701, 12.1, 134.0),
    ("0.6", "H100", "DeepSeek-V3", "turns", 512, 32, (1, 1, 16, 16), 697, 7.24, 111.0),
    ("0.6", "H100", "DeepSeek-V3", "one step off", 256, 32, (1, 1, 16, 16), 710, 12.8, 64.1),
    ("0.6", "GB200", "Qwen3 30B-A3B", "turns", 16, 1, (1, 1, 16, 1), 3199, 1910, 221.0),
    ("0.6", "GB200", "Qwen3 30B-A3B", "one step off", 8, 1, (1, 1, 8, 1), 3197, 1406, 301.0),
    ("0.6", "GB200", "Qwen3 235B-A22B", "turns", 64, 8, (2, 2, 16, 4), 5709, 163, 286.0),
    ("0.6", "GB200", "Qwen3 235B-A22B", "turns", 128, 8, (2, 2, 16, 4), 5693, 67.4, 345.0),
    ("0.6", "GB200", "Qwen3 235B-A22B", "one step off", 64, 8, (4, 1, 16, 4), 5705, 85.5, 278.0),
    ("0.6", "GB200", "DeepSeek-V3", "turns", 128, 32, (1, 1, 16, 8), 711, 30.2, 108.0),
    ("0.6", "GB200", "DeepSeek-V3", "turns", 256, 32, (1, 1, 16, 8), 700, 16.4, 98.7),
    ("0.6", "GB200", "DeepSeek-V3", "one step off", 128, 16, (1, 1, 16, 8), 708, 26.7, 61.7),
)
"""All rows of GRPO in bfloat16 on and one step off policy. Where a table and a recipe of the release do not agree on a
layout, it is the recipe's: those of 30B on 32 H100 (0.4) and on 16 GB200 off policy (0.6)."""


def _samples(model: str) -> tuple[int, int]:
    """Return the samples of a step and of an update (G-GBS and T-GBS)."""
    return (512 if model in _MOST_TOKENS else 2048), 512


def _step(row: tuple[str, str, str, Schedule, int, int, tuple[int, int, int, int], int, float, float]) -> PublishedStep:
    version, device, model, schedule, engines, of_engine, (tp, cp, ep, pp), response_tokens, rate, step_s = row
    samples, of_update = _samples(model)
    n, most = _N.get(model, 32), _MOST_TOKENS.get(model, 4096)
    return PublishedStep(
        study=f"{_SOURCE.format(version=version)}, {device}",
        program="NeMo-RL",
        model=model,
        device=device,
        devices_per_node=72 if device == "GB200" else 8,
        engine=(engines, of_engine),
        training=layout_of("megatron", most, tp=tp, cp=cp, ep=ep, pp=pp, ranks=engines),
        schedule=schedule,
        prompts=samples // n,
        ppo_mini_batch_size=of_update // n,
        n=n,
        prompt_tokens=_PROMPT_TOKENS,
        response_tokens=response_tokens,
        most_response_tokens=most - _PROMPT_TOKENS,
        reference=True,
        fits=_FITS.get((version, device, model, schedule), ()),
        measured={"step": step_s},
        tokens_per_s=rate,
    )


NEMO_RL = tuple(_step(row) for row in _ROWS)
"""The steps. Of half of the devices, one step off, each trains and generates."""
