"""`SGLangServerEngine` on a real server: all that every engine promises, as far as SGLang keeps it on a CPU.

`scripts/sglang-cpu/setup FOLDER` makes an environment for it, and says how to run these.
"""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_oracles import TinyModel, collect, errors, first_then_abandon, make_request
from server_oracles import PROMISES, check_closing, check_update_in_mid_generation
from server_processes import served_by_sglang
from sglang_exchanges import Recorder, run_scenario
from slow_hf_engine import STEP_S
from test_engines import MAX_NUM_SEQS, TOLERANCE, Subject
from test_sglang_server import check_scenario

from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.sglang import SGLangServerEngine

PYTHON = os.environ.get("GCORE_SGLANG_PYTHON", "")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not PYTHON, reason="needs an environment with SGLang: scripts/sglang-cpu/setup FOLDER"
    ),
]

NOT_HERE = {
    # SGLang counts seeds only with --enable-deterministic-inference, which has no attention for a CPU,
    "test_seeds",
    "test_single_samples_of_a_request",
    # and without one the long sample may draw an end at once.
    "test_short_completions_do_not_wait_for_long_ones",
    # SGLang takes fewer tokens than the model does.
    "test_too_long_requests_are_refused",
    "test_longest_request_is_served",
}

globals().update({name: test for name, test in PROMISES.items() if name not in NOT_HERE})


@pytest.fixture(scope="module")
def url(tied: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_by_sglang(
        PYTHON, tied.path, log=tmp_path_factory.mktemp("sglang") / "log"
    ) as address:
        body = {"forward_sleep_time": STEP_S}
        ServerClient(address, timeout_s=600).call_blocking("POST", "/slow_down", body=body)
        yield address


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def engine(url: str, weights_dir: Path) -> Iterator[SGLangServerEngine]:
    engine = SGLangServerEngine.connect(url, weights_dir=weights_dir, max_num_seqs=MAX_NUM_SEQS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
async def subject(engine: SGLangServerEngine, tied: TinyModel) -> Subject:
    subject = Subject(engine, tied)
    await subject.update(tied.old)
    return subject


@pytest.fixture
def either_subject(subject: Subject) -> Subject:
    """A head of its own would need a second server."""
    return subject


async def test_a_finished_sample_comes_before_a_longer_one(subject: Subject) -> None:
    long = make_request("long", 4, max_tokens=200, temperature=0.0)
    (whole,) = (await collect(subject.engine, long)).values()
    assert len(whole.token_ids) > 1
    first = await first_then_abandon(subject.engine, [long, make_request("short", 4, max_tokens=1)])
    assert first.request_id == "short"


async def test_longest_request_that_sglang_takes(subject: Subject) -> None:
    request = make_request("r", 500, n=4, max_tokens=6)
    found = await collect(subject.engine, request)
    assert all(len(c.token_ids) == 6 for c in found.values() if c.finish_reason == "length")
    assert max(errors(subject.model.old, [request], found)) < TOLERANCE


async def test_the_recorded_scenario(subject: Subject, url: str, weights_dir: Path) -> None:
    await subject.update(subject.model.old)
    recorder = Recorder(url)
    async with recorder.running() as proxy:
        connect = partial(SGLangServerEngine.connect, proxy, weights_dir=weights_dir)
        scenario = await run_scenario(await asyncio.to_thread(connect), subject.model)
    check_scenario(scenario, subject.model)


async def test_update_of_a_server_in_mid_generation(subject: Subject) -> None:
    await check_update_in_mid_generation(subject)


async def test_zz_closing(subject: Subject, url: str, weights_dir: Path) -> None:
    """The last ones here relabels the server's weights."""
    await check_closing(
        partial(SGLangServerEngine.connect, url, weights_dir=weights_dir), subject.model
    )
