"""`SGLangEngine` with the real SGLang: its samples are those of transformers, and its server ends with it.

`scripts/sglang-cpu/setup FOLDER` makes an environment for it, and says how to run these.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_oracles import TinyModel, collect, errors, make_request

from gcore_rollout import (
    EngineDiedError,
    HFEngine,
    RequestError,
    RolloutError,
    check_engine_options,
    engine_factory,
    engine_kind,
)
from gcore_rollout.engines.servers.sglang_engine import SGLangEngine

PYTHON = os.environ.get("GCORE_SGLANG_PYTHON", "")
ON_SGLANG = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not PYTHON, reason="needs an environment with SGLang: scripts/sglang-cpu/setup FOLDER"
    ),
]
ARGS = ("--mem-fraction-static", "0.3", "--max-total-tokens", "20000")


def server_pid() -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"sglang.launch_server" in words and words[0] == PYTHON.encode():
            return int(path.parent.name)
    raise AssertionError("there is no server")


@pytest.mark.parametrize("python", ["", "/no/such/python", __file__])
def test_a_python_that_is_none_is_refused(python: str, tmp_path: Path) -> None:
    with pytest.raises(
        RolloutError, match=f"server_python is {python!r}; expected the Python of an environment"
    ):
        SGLangEngine.from_pretrained(tmp_path, server_python=python)


def test_the_registry_makes_it() -> None:
    assert "server_python" in engine_kind("sglang").engine_options
    with pytest.raises(RequestError, match=r"own_options is \['decode_mode'\] for engine 'sglang'"):
        engine_factory("sglang", "model", device="cpu", own_options={"decode_mode": "static"})


def test_options_of_the_server_are_words_of_its_command() -> None:
    options = {
        "attention_backend": "fa3",
        "enable_torch_compile": True,
        "log_requests": False,
        "cuda_graph_bs": [1, 2],
    }
    made: Any = engine_factory("sglang", "model", device="cpu", engine_options=options)
    words = ["--attention-backend", "fa3", "--enable-torch-compile", "--cuda-graph-bs", "1", "2"]
    assert made.keywords["server_args"] == words


def test_fields_of_an_installed_server(tmp_path: Path) -> None:
    source = tmp_path / "lib/python3.12/site-packages/sglang/srt/server_args.py"
    source.parent.mkdir(parents=True)
    source.write_text("class ServerArgs:\n    model_path: str\n    attention_backend: str = ''\n")
    python = str(tmp_path / "bin/python")
    check_engine_options("sglang", {"attention_backend": "fa3", "server_python": python})
    with pytest.raises(
        RequestError, match=r"engine_options has 'atention_backend'; .* such as attention_backend"
    ):
        check_engine_options("sglang", {"atention_backend": "fa3", "server_python": python})


@pytest.fixture(scope="module")
def engine(tied: TinyModel) -> Iterator[SGLangEngine]:
    engine = SGLangEngine.from_pretrained(
        tied.path, server_python=PYTHON, server_args=ARGS, max_num_seqs=4
    )
    yield engine
    folder = engine._folder  # pyright: ignore[reportPrivateUsage]
    assert folder is not None
    asyncio.run(engine.close())
    assert not folder.exists()


class TestOnSGLang:
    """With a server, which takes most of a minute to start."""

    pytestmark = ON_SGLANG

    async def test_greedy_samples_are_those_of_transformers(
        self, engine: SGLangEngine, tied: TinyModel
    ) -> None:
        other = HFEngine.from_pretrained(tied.path, max_num_seqs=4)
        requests = [make_request(str(i), 5 + i, temperature=0.0) for i in range(3)]
        for version, model in enumerate((tied.new, tied.old), start=1):
            for own in (engine, other):
                await own.update_weights(model.state_dict().items(), version=version)
            found, expected = await collect(engine, *requests), await collect(other, *requests)
            assert found.keys() == expected.keys()
            for key, completion in found.items():
                assert completion.token_ids.tolist() == expected[key].token_ids.tolist()
                assert set(completion.weight_versions.tolist()) == {version}
            assert max(errors(model, requests, found)) < 1e-4

    async def test_the_engine_ends_with_its_server(self, engine: SGLangEngine) -> None:
        os.kill(server_pid(), signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(
                EngineDiedError, match=r"the server at http://127.0.0.1:\d+ was lost"
            ):
                await collect(engine, make_request("late", 5))
