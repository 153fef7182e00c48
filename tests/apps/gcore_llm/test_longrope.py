"""A run, its engine and its servers compute rotary embeddings that depend on the length for the same length."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.learning.trainer_worker import _model_options  # pyright: ignore[reportPrivateUsage]
from gcore_llm.sampling import check_engine, engine_factory
from gcore_llm.sections import DataConfig
from gcore_rollout import EngineModelError
from gcore_runs.errors import UserError

pytestmark = pytest.mark.slow

ORIGINAL = 32
SERVED = 64


class Models(BaseHTTPRequestHandler):
    """Answers what models are served, as vLLM does."""

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "phi3", "max_model_len": SERVED}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("phi3")
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": ORIGINAL,
    }
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "pad_token_id": None,
    }
    config = Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=ORIGINAL)
    Phi3ForCausalLM(config).save_pretrained(path)
    return path


def test_engines_are_made_for_the_length_of_the_run(phi3: Path) -> None:
    lengths = DataConfig(max_prompt_length=12, max_response_length=20)
    config = TrainConfig(model=str(phi3), device="cpu", dtype="float32", data=lengths)
    assert _model_options(config, None)["max_length"] == ORIGINAL
    engine_factory(config.rollout, config, phi3, eos_token_ids=[1])()
    longer = replace(config, data=replace(config.data, max_response_length=21))
    with pytest.raises(EngineModelError, match="max_model_len is 33; expected at most 32"):
        engine_factory(longer.rollout, longer, phi3, eos_token_ids=[1])()


def test_a_server_that_chooses_other_factors_is_refused(phi3: Path, url: str) -> None:
    settings = RolloutConfig(
        engine="vllm_server", urls=(url,), engine_options={"weights_dir": "weights"}
    )
    check_engine(settings, phi3, setting="rollout", max_length=ORIGINAL + 1)
    with pytest.raises(
        UserError,
        match=r"has max_model_len 64; expected at most 32: rope_type 'longrope' has other",
    ):
        check_engine(settings, phi3, setting="rollout", max_length=ORIGINAL)


def test_sglang_is_refused_for_factors_of_a_batch(phi3: Path, url: str) -> None:
    settings = RolloutConfig(
        engine="sglang_server", urls=(url,), engine_options={"weights_dir": "weights"}
    )
    with pytest.raises(
        UserError, match=r"^rollout.engine is 'sglang_server'; expected hf, vllm or vllm_server"
    ):
        check_engine(settings, phi3, setting="rollout", max_length=ORIGINAL)
