"""Sessions on a plain vLLM server: its tokens and log-probs are those of the turns."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_oracles import TinyModel
from scripted import make_session
from server_processes import served_by_vllm
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer

from gcore_agents import ChatCall, ChatEncoder, Session, SessionBudget
from gcore_agents.errors import SamplerError
from gcore_agents.server import AgentServer
from gcore_agents.server_sampler import ServerSampler


async def test_tokens_come_as_vllm_sends_them() -> None:
    """The endpoint itself answers as vLLM does."""
    server = AgentServer()
    await server.start()
    inner = make_session("One. Two.", "Three.")
    sampler = ServerSampler(server.open(inner), "any", api_key=inner.key)
    sampler.weight_version = 7
    turn = await sampler.sample([4, 5], session="s", seed=-3, max_tokens=50, stop=["One."])
    assert inner.encoder.text(turn.token_ids) == "One."
    assert turn.finish_reason == "stop"
    assert turn.log_probs == [-0.5, -1.5, -2.5, -3.5]
    assert turn.weight_versions == [7] * 4
    turn = await sampler.sample([4, 5, 6], session="s", seed=0, max_tokens=2)
    assert (len(turn.token_ids), turn.finish_reason) == (2, "length")
    with pytest.raises(SamplerError, match="400"):
        await sampler.sample([], session="s", seed=0, max_tokens=2)
    await server.close()
    with pytest.raises(SamplerError, match="cannot be asked"):
        await sampler.sample([4], session="s", seed=0, max_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "expected"), [({"temperature": 0.0}, "temperature"), ({}, "base_url")]
)
def test_wrong_arguments(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ServerSampler("localhost", "any", **arguments)


@pytest.fixture(scope="module")
def url(
    tied: TinyModel, tmp_path_factory: pytest.TempPathFactory, vllm_forks: None
) -> Iterator[str]:
    options = "--served-model-name tiny --no-skip-tokenizer-init --max-num-seqs 4"
    log = tmp_path_factory.mktemp("vllm") / "log"
    with served_by_vllm(tied.path, *options.split(), log=log) as address:
        yield f"{address}/v1"


def log_probs(
    model: Any, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float
) -> list[float]:
    """Return the log-probs of tokens after a prompt, by the model itself."""
    tokens = torch.tensor([[*prompt_ids, *token_ids]])
    with torch.no_grad():
        logits_TV = model(tokens).logits[0, len(prompt_ids) - 1 : -1] / temperature
    log_probs_TV = torch.log_softmax(logits_TV, -1)
    return log_probs_TV[range(len(token_ids)), token_ids].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sessions_on_vllm(url: str, tied: TinyModel, temperature: float) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tied.path)
    tokenizer.backend_tokenizer.pre_tokenizer = Split("", "isolated")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}x{% endfor %}"
    session = Session(
        session_id="session",
        sampler=ServerSampler(url, "tiny", temperature=temperature),
        encoder=ChatEncoder(tokenizer),
        budget=SessionBudget(max_tokens=64),
    )
    messages: list[Any] = [{"role": "user", "content": "abc"}]
    for _ in range(2):
        (reply,) = await session.respond(ChatCall(messages=messages, max_tokens=12))
        session.mark_delivered([reply])
        messages += [reply.message, {"role": "user", "content": "de"}]
    first, second = session.graph.turns()
    assert second.path()[1] is first
    for turn in (first, second):
        assert turn.parent is not None
        expected = log_probs(tied.old, turn.parent.path_tokens(), turn.token_ids, temperature)
        assert turn.log_probs == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
async def test_vllm_refuses_what_is_too_long(url: str) -> None:
    with pytest.raises(SamplerError, match="400"):
        await ServerSampler(url, "tiny").sample([4] * 100_000, session="s", seed=0, max_tokens=2)
