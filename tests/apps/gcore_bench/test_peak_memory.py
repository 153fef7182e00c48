"""The planner's peak of training memory against that of real steps of `gcore_trainer`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gcore_placement import Efficiency, Job, Lengths, ModelShape, TrainingLayout
from gcore_placement.planning import memory
from gcore_placement.planning.layouts import TrainingLayouts

SMALL: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
CASES: list[tuple[dict[str, Any], int, bool]] = [
    (SMALL, 1024, False),
    (
        {
            **SMALL,
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_hidden_layers": 8,
            "num_attention_heads": 12,
        },
        512,
        True,
    ),
    ({**SMALL, "vocab_size": 16384, "tie_word_embeddings": False}, 512, False),
]
"""Models, tokens of a micro-batch, and recomputation."""
GROUPS = 2
RESPONSES = 4


@pytest.fixture(scope="module")
def lengths() -> tuple[list[int], list[list[int]]]:
    """Of prompts, and of each one's responses: a little less than 512 tokens a group."""
    rng = np.random.default_rng(0)
    return rng.integers(40, 60, GROUPS).tolist(), rng.integers(
        95, 112, (GROUPS, RESPONSES)
    ).tolist()


@pytest.fixture(scope="module")
def measured(lengths: tuple[list[int], list[list[int]]]) -> list[float]:
    """Peak bytes of each case."""
    script = Path(__file__).parent / "peak_memory.py"
    cases = json.dumps([[*case, *lengths] for case in CASES])
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), cases]
    output = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert output.returncode == 0, output.stderr
    return [json.loads(line) for line in output.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)))
def test_peak_memory_is_predicted(
    number: int, measured: list[float], lengths: tuple[list[int], list[list[int]]]
) -> None:
    """Within 15 percent, by the defaults of `Efficiency`."""
    config, max_tokens, recompute = CASES[number]
    job = Job(
        policy=ModelShape.from_config(config),
        prompt_lengths=Lengths.recorded(lengths[0]),
        response_lengths=Lengths.recorded(np.ravel(lengths[1])),
        train_batch_size=GROUPS,
        n=RESPONSES,
        compute_bytes=4,
    )
    layout = TrainingLayout(
        backend="torch",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        context_parallel_size=1,
        data_parallel_size=1,
        gradient_checkpointing=recompute,
        ppo_max_token_len=max_tokens,
    )
    parts = memory.training_memory(
        job, TrainingLayouts(layout), activations=Efficiency().activations
    )
    assert memory.total(parts)[0] == pytest.approx(measured[number], rel=0.15)
