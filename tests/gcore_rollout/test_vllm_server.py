"""`VLLMServerEngine` on a real `vllm serve`: all that every engine promises."""

import asyncio
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine_oracles import TinyModel, collect, errors, make_request
from server_oracles import PROMISES, check_closing, check_update_in_mid_generation
from server_processes import served_by_vllm
from slow_hf_engine import STEP_S
from test_engines import MAX_NUM_SEQS, TOLERANCE, Subject

from gcore_rollout import DigestedWeights, InstrumentedEngine, WeightRecord, WrongWeightsError
from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.vllm import VLLMServerEngine

pytestmark = pytest.mark.slow

globals().update(PROMISES)


@pytest.fixture(scope="module")
def url(
    tied: TinyModel, tmp_path_factory: pytest.TempPathFactory, vllm_forks: None
) -> Iterator[str]:
    options = ["--worker-extension-cls", "slow_vllm_worker.SlowWorker"]
    options += ["--max-num-seqs", str(MAX_NUM_SEQS)]
    env = {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path(__file__).parent}"}
    log = tmp_path_factory.mktemp("vllm") / "log"
    with served_by_vllm(tied.path, *options, log=log, env=env) as address:
        client = ServerClient(address, timeout_s=600)
        client.call_blocking(
            "POST", "/collective_rpc", body={"method": "slow_down", "args": [STEP_S]}
        )
        yield address


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def engine(url: str, weights_dir: Path) -> Iterator[VLLMServerEngine]:
    engine = VLLMServerEngine.connect(url, weights_dir=weights_dir)
    yield engine
    asyncio.run(engine.close())
    assert not list(weights_dir.iterdir())


@pytest.fixture
async def subject(engine: VLLMServerEngine, tied: TinyModel) -> Subject:
    subject = Subject(engine, tied)
    await subject.update(tied.old)
    return subject


@pytest.fixture
def either_subject(subject: Subject) -> Subject:
    """A head of its own would need a second server, which takes longer to start than all tests to run."""
    return subject


async def test_only_the_present_weights_are_kept(subject: Subject, weights_dir: Path) -> None:
    for model in (subject.model.new, subject.model.old, subject.model.new):
        version = await subject.update(model)
        (folder,) = weights_dir.iterdir()
        assert folder.name.startswith(f"weights-{version}-")
    request = make_request("r", 9)
    assert (
        max(errors(subject.model.new, [request], await collect(subject.engine, request)))
        < TOLERANCE
    )


async def test_weights_of_a_server_are_compared(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It digests them, with the packed head, and says itself which version they have."""
    engine = InstrumentedEngine(subject.engine, name="the server", record=WeightRecord())
    version = engine.weight_version
    held = await engine.held_weights()
    assert held is not None
    assert held.version == version
    named = [name for name, _ in subject.model.new.named_parameters()]
    assert {tensor.name for tensor in held.tensors} == {*named, "lm_head.weight"}
    await engine.update_weights(
        DigestedWeights(subject.model.new.named_parameters()), version=version + 1
    )
    call = VLLMServerEngine._call_worker  # pyright: ignore[reportPrivateUsage]

    async def call_all_but_one(self: VLLMServerEngine, method: str, **arguments: Any) -> Any:
        if method == "repack_tied_head":
            return None
        return await call(self, method, **arguments)

    monkeypatch.setattr(VLLMServerEngine, "_call_worker", call_all_but_one)
    with pytest.raises(
        WrongWeightsError,
        match=r"the server .*'lm_head.weight' has the values of version \d+ \(1 of 27",
    ):
        await engine.update_weights(
            DigestedWeights(subject.model.old.named_parameters()), version=version + 2
        )


async def test_update_of_a_server_in_mid_generation(subject: Subject) -> None:
    await check_update_in_mid_generation(subject)


async def test_zz_closing(subject: Subject, url: str, weights_dir: Path) -> None:
    """The last one here: another engine relabels the server's weights."""
    await check_closing(
        partial(VLLMServerEngine.connect, url, weights_dir=weights_dir), subject.model
    )
