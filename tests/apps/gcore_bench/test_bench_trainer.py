"""The bench of the trainer: one quick real run, and its samples, batches and checks."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from gcore_bench.harness.report import BenchError
from gcore_bench.trainer import (
    StepContender,
    TrainerOptions,
    check_agreement,
    make_samples,
    step_batches,
)


@pytest.mark.parametrize("contender", get_args(StepContender))
def test_every_sample_is_in_one_micro_batch(contender: str) -> None:
    options = TrainerOptions(prompts=16)
    samples = make_samples(options)
    batches = step_batches(options, samples, contender)
    assert len(batches) > 1
    assert sorted(i for batch in batches for i in batch) == list(range(64))
    if contender == "gcore-shared":
        for batch in batches:
            prompts = {i // 4: samples[i].prompt_ids.size for i in batch}
            assert all(set(range(4 * prompt, 4 * prompt + 4)) <= set(batch) for prompt in prompts)
            assert (
                sum(prompts.values()) + sum(samples[i].response_ids.size for i in batch)
                <= options.max_tokens
            )
    elif contender != "trl":
        for batch in batches:
            lengths = [samples[i].prompt_ids.size + samples[i].response_ids.size for i in batch]
            assert sum(lengths) <= options.max_tokens


def test_lengths_have_a_long_tail() -> None:
    lengths = np.array([s.response_ids.size for s in make_samples(TrainerOptions(prompts=200))])
    assert np.median(lengths) == pytest.approx(48, rel=0.1)
    assert lengths.mean() > 1.4 * np.median(lengths)
    assert lengths.max() == 384


def test_a_group_shares_its_prompt_and_its_advantages_sum_to_nothing() -> None:
    samples = make_samples(TrainerOptions())
    for k in range(0, len(samples), 4):
        group = samples[k : k + 4]
        assert len({s.prompt_ids.tobytes() for s in group}) == 1
        assert sum(
            float(s.advantages[0]) for s in group if s.advantages is not None
        ) == pytest.approx(0, abs=1e-5)


def test_contenders_that_compute_something_else_are_found() -> None:
    rows = {"a": {"loss": 0.5, "grad_norm": 1.0}, "b": {"loss": 0.50009, "grad_norm": 1.0}}
    check_agreement(rows)
    with pytest.raises(BenchError, match=r"loss is 0\.5 for a, but 0\.51 for b"):
        check_agreement(rows | {"b": {"loss": 0.51, "grad_norm": 1.0}})
    with pytest.raises(BenchError, match="but nan for b"):
        check_agreement(rows | {"b": {"loss": 0.5, "grad_norm": float("nan")}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected 1 or more"),
        ({"contenders": ()}, "contenders is empty"),
        ({"hidden_size": 100}, "hidden_size is 100; expected a multiple of 32"),
        ({"max_response_length": 1}, "max_response_length is 1; expected 2 or more"),
        (
            {"json": Path("/nowhere/x.json")},
            "json is '/nowhere/x.json'; expected a file in an existing folder",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        TrainerOptions(**options)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_measures_the_trainer(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gcore_bench",
        "trainer",
        "--quick",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    figures: dict[str, Any] = json.loads((tmp_path / "figures.json").read_text())
    (part,) = figures["parts"]
    rows: dict[str, dict[str, float]] = part["rows"]
    assert list(rows) == ["trl", "verl", "gcore-packed", "gcore-shared"]
    for row in rows.values():
        assert row["step_s"] > 0
        assert row["cpu_s"] > 0
        assert row["loss"] == pytest.approx(rows["trl"]["loss"], abs=1e-4)
        assert row["grad_norm"] == pytest.approx(rows["trl"]["grad_norm"], rel=1e-4)
    assert rows["trl"]["computed_tokens"] > rows["gcore-packed"]["computed_tokens"]
    assert rows["gcore-packed"]["computed_tokens"] > rows["gcore-shared"]["computed_tokens"]
