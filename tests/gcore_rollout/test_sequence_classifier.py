"""A reward model's logits, batched, against transformers' own forward of each text alone."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from gcore_rollout import (
    EngineModelError,
    RewardConfigError,
    RewardError,
    RewardRunner,
    evaluate,
    score,
)
from gcore_rollout.rewards.kinds.sequence_classifier import (
    SequenceClassifierReward,
    batches_by_length,
    encoder,
)

PAD = 3
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "initializer_range": 0.2,
}
TEXTS = [
    "a",
    "the cat",
    "x" * 40,
    "b" * 7,
    "a",
    "some more words of it",
    "ends in pad\x03",
    "\x03\x03",
]


def encode(prompt: str, completion: str) -> list[int]:
    return [ord(c) % 96 for c in prompt + completion]


def model_of(kind: str = "qwen2", **fields: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES | {"num_labels": 1} | fields
    if kind == "bert":
        model: Any = BertForSequenceClassification(BertConfig(**sizes))
    else:
        model = Qwen2ForSequenceClassification(Qwen2Config(num_key_value_heads=2, **sizes))
    return model.eval()


@torch.inference_mode()
def alone(model: Any, token_ids: Sequence[int]) -> float:
    """Score a text by transformers, which scores the last token if there is no padding token."""
    padding, model.config.pad_token_id = model.config.pad_token_id, None
    logits_11 = model(torch.tensor([token_ids])).logits
    model.config.pad_token_id = padding
    return float(logits_11[0, 0])


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
@pytest.mark.parametrize("pad", [PAD, ord("d") % 96, None])
async def test_batched_logits_are_those_of_each_text_alone(kind: str, pad: int | None) -> None:
    """Also where a text ends in the padding token, as it does where that ends responses."""
    model = model_of(kind, pad_token_id=PAD if kind == "bert" else pad)
    reward = SequenceClassifierReward(model, encode=encode, max_batch_tokens=100)
    scores = await asyncio.gather(
        *(score(reward, prompt="say: ", completion=t, row={}) for t in TEXTS)
    )
    expected = [alone(model, encode("say: ", t)) for t in TEXTS]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert max(scores) - min(scores) > 0.01, "the model distinguishes them"
    assert 2 <= reward.num_batches < len(TEXTS)
    reward.close()


async def test_calls_that_come_together_are_one_batch() -> None:
    reward = SequenceClassifierReward(model_of(), encode=encode, max_wait_s=0.2)
    calls = [
        asyncio.create_task(score(reward, prompt="p", completion=t, row={})) for t in TEXTS[:4]
    ]
    await asyncio.sleep(0.05)
    late = asyncio.create_task(score(reward, prompt="p", completion="late", row={}))
    await asyncio.gather(*calls, late)
    assert reward.num_batches == 1
    await score(reward, prompt="p", completion="alone", row={})
    assert reward.num_batches == 2
    reward.close()


async def test_calls_that_come_during_a_forward_are_the_next_batch() -> None:
    model = model_of()
    reward = SequenceClassifierReward(model, encode=encode, max_wait_s=0.0)
    later: list[asyncio.Task[float]] = []
    loop = asyncio.get_running_loop()
    started = asyncio.Event()
    go_on = asyncio.Event()
    forward: Callable[..., Any] = model.model.forward

    def slow(**inputs: Any) -> Any:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return forward(**inputs)

    model.model.forward = slow
    first = asyncio.create_task(score(reward, prompt="", completion="first", row={}))
    await started.wait()
    later = [asyncio.create_task(score(reward, prompt="", completion=t, row={})) for t in TEXTS]
    await asyncio.sleep(0.01)
    go_on.set()
    await asyncio.gather(first, *later)
    assert reward.num_batches == 2
    reward.close()


async def test_a_call_that_is_given_up_does_not_hold_up_the_others() -> None:
    reward = SequenceClassifierReward(model_of(), encode=encode, max_wait_s=0.05)
    calls = [asyncio.create_task(score(reward, prompt="", completion=t, row={})) for t in TEXTS[:3]]
    await asyncio.sleep(0)
    calls[1].cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[1], asyncio.CancelledError)
    assert isinstance(results[0], float)
    assert await score(reward, prompt="", completion="a", row={}) == pytest.approx(
        results[0], abs=1e-5
    )
    reward.close()


async def test_an_error_of_the_model_reaches_every_call_of_its_batch() -> None:
    def encode(prompt: str, completion: str) -> list[int]:
        return [99 if completion == "bad" else 1]

    reward = SequenceClassifierReward(model_of(), encode=encode, max_batch_tokens=2)
    texts = ["good", "good", "bad", "good", "good"]
    results = await asyncio.gather(
        *(evaluate(reward, prompt="", completion=t, row={}) for t in texts), return_exceptions=True
    )
    failed = [isinstance(r, RewardError) and "IndexError" in str(r) for r in results]
    assert failed == [False, False, True, True, False], "two, two and one go together"
    assert await score(reward, prompt="", completion="good", row={}) == pytest.approx(
        alone(model_of(), [1]), abs=1e-5
    )
    reward.close()


async def test_under_a_runner() -> None:
    model = model_of()
    reward = SequenceClassifierReward(model, encode=encode)
    runner = RewardRunner(reward)
    results: list[Any] = await asyncio.gather(
        *(runner.score(prompt="", completion=t, row={}) for t in TEXTS)
    )
    assert [r.score for r in results] == pytest.approx(
        [alone(model, encode("", t)) for t in TEXTS], abs=1e-5
    )
    reward.close()


CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }};{% endfor %}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {chr(i + 32): i for i in range(95)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?", pad_token="#")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.mark.parametrize("chat", [False, True])
async def test_a_folder(tmp_path: Path, chat: bool) -> None:
    model = model_of()
    model.save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    reward = SequenceClassifierReward.from_pretrained(tmp_path, apply_chat_template=chat)
    text = "<user>say:<;<assistant>ah;" if chat else "say:<ah"
    token_ids: Any = tokenizer(text)["input_ids"]
    assert len(token_ids) == len(text)
    assert encoder(tokenizer, apply_chat_template=chat)("say:<", "ah") == token_ids
    assert await score(reward, prompt="say:<", completion="ah", row={}) == pytest.approx(
        alone(model, token_ids), abs=1e-5
    )
    reward.close()


@pytest.mark.parametrize("length", [0, 65])
async def test_texts_that_do_not_fit(length: int) -> None:
    reward = SequenceClassifierReward(model_of(), encode=encode)
    with pytest.raises(
        RewardError, match=rf"the text has {length} tokens; expected 1 to max_length=64"
    ):
        await score(reward, prompt="", completion="x" * length, row={})
    reward.close()


@pytest.mark.parametrize(
    ("fields", "options", "error", "message"),
    [
        ({"num_labels": 2}, {}, EngineModelError, "num_labels=2; expected 1"),
        ({"kind": "bert", "pad_token_id": None}, {}, EngineModelError, "no pad_token_id"),
        (
            {},
            {"max_batch_tokens": 0},
            RewardConfigError,
            "max_batch_tokens is 0; expected at least 1",
        ),
        ({}, {"max_wait_s": -1}, RewardConfigError, "max_wait_s is -1; expected 0 or more"),
        ({}, {"max_length": -1}, RewardConfigError, "max_length is -1 "),
    ],
)
def test_bad_settings(fields: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        SequenceClassifierReward(model_of(**fields), encode=encode, **options)


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 200))
def test_batches(lengths: list[int], max_tokens: int) -> None:
    batches = batches_by_length(lengths, max_tokens=max_tokens)
    assert sorted(i for b in batches for i in b) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens
    ordered = [lengths[i] for b in batches for i in b]
    assert ordered == sorted(ordered)
