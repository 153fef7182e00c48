"""A run's folder as gcore-llm leaves it, with what a simulation reads of it, and some of what it does not."""

from pathlib import Path

CONFIG = """\
name = "mine"

[rollout]
engine = "hf"
n = 4

[reward_model]
kind = "judge"

[reward_model.judge]
n = 1
max_response_length = 96
"""

METRICS = """\
{"step": 0, "val/greedy/score/mean": 0.425, "val/sampled/score/mean": 0.99}
{"step": 1, "sampling/waves": 2.0, "sampling/acceptance": 0.6666666666666666, "sampling/groups": 8.0, \
"sampling/oldest_version": 0.0, "response_length/mean": 30.5, "response_length/max": 64.0, \
"response_length/clip_ratio": 0.125, "prompt_length/mean": 4.625, \
"perf/total_num_tokens": 1686.0, "timing_s/step": 2.25}
{"step": 2, "sampling/waves": 1.0, "sampling/acceptance": 1.0, "sampling/groups": 8.0, \
"sampling/oldest_version": 1.0, "response_length/mean": 20.0, "response_length/max": 51.0, \
"response_length/clip_ratio": 0.0, "prompt_length/mean": 5.0, "perf/total_num_tokens": 800.0, "timing_s/step": 1.5}
{"step": 3, "sampling/waves": 1.0, "samp"""


def recorded_run(folder: Path) -> Path:
    """A run of two steps, ended in the middle of a line: of 12 prompts in two waves, and of 8 in one."""
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text(METRICS)
    return folder
