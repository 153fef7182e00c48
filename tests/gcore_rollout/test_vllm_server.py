"""`VLLMServerEngine` on a real `vllm serve`: all that every engine promises."""

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_oracles import TinyModel, collect, errors, make_request
from server_oracles import PROMISES, check_closing, check_update_in_mid_generation
from server_processes import free_port, served
from slow_hf_engine import STEP_S
from test_engines import MAX_NUM_SEQS, TOLERANCE, Subject

from gcore_rollout.engines.servers.client import ServerClient
from gcore_rollout.engines.servers.vllm import VLLMServerEngine

pytestmark = pytest.mark.slow

globals().update(PROMISES)


@pytest.fixture(scope="module")
def url(tied: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [
        # The `vllm` command asks for a distribution of that name, which vLLM's build for CPU is not.
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tied.path)),
        *("--host", "127.0.0.1", "--port", str(port)),
        *(
            "--enable-scale-out",
            "--logprobs-mode",
            "processed_logprobs",
            "--generation-config",
            "vllm",
        ),
        *("--skip-tokenizer-init", "--no-enable-chunked-prefill"),
        *("--worker-extension-cls", "slow_vllm_worker.SlowWorker"),
        *("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
    ]
    env = {
        "PYTHONPATH": str(Path(__file__).parent),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # One process less to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Else the first log-probs wait for a compiler.
        "TORCH_COMPILE_DISABLE": "1",
    }
    log = tmp_path_factory.mktemp("vllm") / "log"
    with served(command, port=port, env=env, log=log, timeout_s=1800) as address:
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


async def test_update_of_a_server_in_mid_generation(subject: Subject) -> None:
    await check_update_in_mid_generation(subject)


async def test_zz_closing(subject: Subject, url: str, weights_dir: Path) -> None:
    """The last one here: another engine relabels the server's weights."""
    await check_closing(
        partial(VLLMServerEngine.connect, url, weights_dir=weights_dir), subject.model
    )
