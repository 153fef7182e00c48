"""`SGLangServerEngine` on what a real server said once; `test_sglang_real_server.py` asks one."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_oracles import EOS_TOKEN_IDS, TinyModel, errors, reference_after_swap, repeats
from sglang_exchanges import RECORDED, Replay, Scenario, run_scenario

from gcore_rollout import RepetitionDetection, Request, RequestError, RolloutError, SamplingParams
from gcore_rollout.engines.servers.sglang import SGLangServerEngine

TOLERANCE = 1e-5


def check_scenario(scenario: Scenario, model: TinyModel) -> None:
    """What came is what transformers says of it."""
    found = scenario.found
    for model_then, requests in ((model.old, scenario.by_old), (model.new, scenario.by_new)):
        ids = {r.request_id for r in requests}
        mine = {key: c for key, c in found.items() if key[0] in ids}
        assert len(mine) == sum(r.n for r in requests)
        assert max(errors(model_then, requests, mine)) < TOLERANCE
        versions = {int(v) for c in mine.values() for v in c.weight_versions}
        assert versions == {0 if model_then is model.old else 1}

    crossed = found["crossing", 0]
    num_old = int((crossed.weight_versions == 0).sum())
    assert 4 <= num_old < len(crossed.token_ids)
    assert crossed.weight_versions.tolist() == [0] * num_old + [1] * (
        len(crossed.token_ids) - num_old
    )
    expected = reference_after_swap(
        model.old, model.new, scenario.crossing, crossed.token_ids, num_old
    )
    np.testing.assert_allclose(crossed.log_probs, expected, atol=TOLERANCE, rtol=0)

    cut, whole = scenario.cut["long", 0], found["long", 0]
    assert (cut.finish_reason, whole.finish_reason) == ("abort", "length")
    assert 4 <= len(cut.token_ids) < len(whole.token_ids) == 16
    assert whole.token_ids[: len(cut.token_ids)].tolist() == cut.token_ids.tolist()
    assert scenario.cut["held", 0].finish_reason == "abort"
    assert len(scenario.cut["held", 0].token_ids) >= 4

    guarded = found["guarded", 0]
    detection = RepetitionDetection(max_pattern_size=8, min_count=2)
    assert guarded.finish_reason == "repetition"
    tokens = guarded.token_ids.tolist()
    assert repeats(tokens, detection)
    assert not any(repeats(tokens[:end], detection) for end in range(1, len(tokens)))


async def connect(url: str, **options: Any) -> SGLangServerEngine:
    return await asyncio.to_thread(lambda: SGLangServerEngine.connect(url, **options))


async def test_what_a_real_server_said(tied: TinyModel, tmp_path: Path) -> None:
    """Every call of the engine is one that the server got and understood; its answers are read as they were meant."""
    replay = Replay.of(RECORDED, model_path=tied.path)
    async with replay.running() as url:
        engine = await connect(url, weights_dir=tmp_path)
        scenario = await run_scenario(engine, tied)
    assert not replay.unexpected
    assert not replay.left
    check_scenario(scenario, tied)


async def test_overlapped_steps_are_refused(tied: TinyModel) -> None:
    replay = Replay.of(RECORDED, model_path=tied.path)
    replay.left[0].answer["disable_overlap_schedule"] = False
    async with replay.running() as url:
        with pytest.raises(
            RolloutError,
            match="would carry wrong versions: start it with --disable-overlap-schedule",
        ):
            await connect(url)


async def test_ends_that_the_model_declares_cannot_be_left_out(tied: TinyModel) -> None:
    async with Replay.of(RECORDED, model_path=tied.path).running() as url:
        with pytest.raises(
            ValueError, match=r"eos_token_ids is \[1\]; expected \[5\], too, where SGLang ends any"
        ):
            await connect(url, eos_token_ids=EOS_TOKEN_IDS[:1])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (
            SamplingParams(max_tokens=2, temperature=1e-7),
            r"temperature 1e-07: SGLang takes 0 \(greedy\) or 1e-06 and",
        ),
        (
            SamplingParams(max_tokens=504),
            "3 prompt \\+ 504 completion tokens = 507; expected at most 506",
        ),
    ],
)
async def test_what_sglang_would_change_is_refused(
    tied: TinyModel, sampling: SamplingParams, message: str
) -> None:
    """Very low temperatures become greedy, and long completions shorter, without a word."""
    async with Replay.of(RECORDED, model_path=tied.path).running() as url:
        engine = await connect(url)
        with pytest.raises(RequestError, match=message):
            async for _ in engine.generate(
                [Request(request_id="r", prompt_token_ids=(3, 4, 7), sampling=sampling)]
            ):
                pass
