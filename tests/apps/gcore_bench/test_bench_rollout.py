"""The bench of rollouts: one quick real run of both parts, and its requests and checks."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest

from gcore_bench import rollout
from gcore_bench.harness.report import BenchError, Rounds
from gcore_bench.rollout import (
    GenerationContender,
    RolloutOptions,
    collect,
    count_tokens,
    make_requests,
    measure_generate,
    measure_generation,
)
from gcore_rollout import Completion, Engine, Request


def test_lengths_have_a_tail_and_fit_the_model() -> None:
    options = RolloutOptions(prompts=64)
    requests = make_requests(options)
    lengths = [r.sampling.max_tokens for r in requests]
    assert max(lengths) == options.max_response_length
    assert sorted(lengths)[32] < options.max_response_length / 3
    assert max(len(r.prompt_token_ids) for r in requests) <= options.max_prompt_length
    assert count_tokens(requests) == options.n * sum(lengths)
    assert requests == make_requests(options)


class FakeEngine:
    """Makes the tokens that it is asked for, or some fewer."""

    def __init__(self, missing: int) -> None:
        self._missing = missing

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        for request in requests:
            length = request.sampling.max_tokens - self._missing
            for index in request.sample_indices:
                yield Completion(
                    request_id=request.request_id,
                    index=index,
                    token_ids=np.zeros(length, np.int64),
                    log_probs=np.zeros(length, np.float32),
                    weight_versions=np.zeros(length, np.int32),
                    finish_reason="length",
                )


@pytest.mark.parametrize("missing", [0, 1])
def test_a_contender_makes_the_tokens_that_were_asked_for(
    tmp_path: Path, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RolloutOptions(contenders=("gcore-hf",), max_response_length=8)
    generate: Any = partial(collect, cast("Engine", FakeEngine(missing)))
    figures = asyncio.run(measure_generate(generate, make_requests(options), [os.getpid()]))
    monkeypatch.setattr(rollout, "run_processes", lambda _: figures)
    monkeypatch.setattr(rollout, "start_server", lambda *_, **__: None)
    monkeypatch.setattr(rollout, "make_model", lambda *_, **__: None)
    rounds = Rounds("generation", 2, say=lambda _: None)
    if missing:
        with pytest.raises(
            BenchError, match=f"the samples have {count_tokens(make_requests(options))}"
        ):
            measure_generation(options, tmp_path, rounds)
    else:
        measure_generation(options, tmp_path, rounds)
        assert [run.round for run in rounds.runs] == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds is 0; expected 1 or more"),
        ({"parts": ()}, "parts is empty"),
        ({"contenders": ()}, "contenders is empty"),
        ({"vocab_size": 0}, "vocab_size is 0; expected 1 or more"),
        (
            {"json": Path("/nowhere/x.json")},
            "json is '/nowhere/x.json'; expected a file in an existing folder",
        ),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchError, match=message):
        RolloutOptions(**options)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_commands")
def test_bench_measures_rollouts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gcore_bench",
        "rollout",
        "--quick",
        "--json",
        str(tmp_path / "figures.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""

    generation, sync = json.loads((tmp_path / "figures.json").read_text())["parts"]
    rows: dict[str, dict[str, Any]] = generation["rows"]
    assert list(rows) == list(get_args(GenerationContender))
    expected = count_tokens(make_requests(RolloutOptions(quick=True).resize_if_quick()))
    for row in rows.values():
        assert row["tokens"] == expected
        assert row["tokens_per_s"] > 0
        assert row["cpu_s"] > 0
        assert -7 < row["log_prob"] < -3
    # The same seeds give the same tokens: what is compared is one piece of work.
    for name in ("gcore-vllm", "gcore-vllm-process"):
        assert rows[name]["log_prob"] == pytest.approx(rows["vllm"]["log_prob"], abs=1e-3)
    assert rows["gcore-hf-process"]["log_prob"] == pytest.approx(
        rows["gcore-hf"]["log_prob"], abs=1e-5
    )
    ratios = {name: row["tokens_per_s_ratio"] for name, row in rows.items() if "cpu_s_ratio" in row}
    assert list(ratios) == ["gcore-vllm", "gcore-vllm-process", "gcore-hf", "gcore-hf-process"]
    assert all(isfinite(ratio) and ratio > 0 for ratio in ratios.values())

    rows = sync["rows"]
    assert list(rows) == ["memcpy", "full", "delta 0.1 %", "delta 1 %", "delta 10 %", "adapters"]
    sent = {name: row["sent_bytes"] / rows["memcpy"]["sent_bytes"] for name, row in rows.items()}
    assert 0 < sent["delta 0.1 %"] < sent["delta 1 %"] < sent["delta 10 %"] < sent["full"] == 1
    assert sent["delta 1 %"] == pytest.approx(0.03, rel=0.1)  # six bytes an element instead of two
    assert sent["adapters"] == 16 * (1024 + 512) / (1024 * 512)
    assert all(row["apply_s"] > 0 for row in rows.values())
