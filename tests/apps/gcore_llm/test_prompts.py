"""The token ids of prompts: the same in training, evaluation, `sample` and fine-tuning, and those of transformers."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import write_rows
from tokenizers.processors import TemplateProcessing
from transformers import BloomConfig, GPT2Config, Qwen3Config

from gcore_llm import training
from gcore_llm.config import RolloutConfig, TrainConfig
from gcore_llm.data.tasks import load_task
from gcore_llm.finetune.tokens import Encoder
from gcore_llm.learning.config import AlgorithmConfig
from gcore_llm.prompts import PromptSets, check_lengths, load_files, longest_sequence
from gcore_llm.sampling import engine_factory
from gcore_llm.sections import CriticConfig, DataConfig, TaskConfig
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import Completion, Prompt, Request
from gcore_runs.errors import UserError

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
BOS = "<pad>"
"""A token that the tiny tokenizer has, in the place of one of its own."""


def tokenizer_of(kind: str) -> Any:
    tokenizer = tiny_tokenizer()
    if "bos" in kind:
        tokenizer.bos_token = BOS
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.convert_tokens_to_ids(BOS))]
        )
    if "template" in kind:
        tokenizer.chat_template = ("{{ bos_token }}" if "in template" in kind else "") + TEMPLATE
    return tokenizer


class Asked:
    """An engine that keeps what it is asked, and answers nothing."""

    requests: list[Request]

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        self.requests = list(requests)
        for completion in ():
            yield completion

    async def close(self) -> None:
        pass


def asked_by_sample(
    tokenizer: Any, config: TrainConfig, prompt: str, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    engine = Asked()

    async def policy(*_: object) -> Any:
        return engine, 0

    monkeypatch.setattr(training, "load_run", lambda path: (path, config))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(training, "build_tokenizer", lambda _: tokenizer)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(training, "finished_policy", policy)
    options: dict[str, Any] = {"n": 1, "temperature": 0.0, "max_tokens": 1, "seed": 0}
    assert asyncio.run(training.sample_run(Path(), prompt, **options)) == []
    return list(engine.requests[0].prompt_token_ids)


def by_transformers(tokenizer: Any, text: str, *, applies_template: bool) -> list[int]:
    if applies_template and tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize("apply_chat_template", ["auto", "never"])
@pytest.mark.parametrize(
    "kind", ["plain", "template", "bos", "bos, template", "bos, bos in template"]
)
def test_one_prompt_everywhere(
    kind: str, apply_chat_template: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_of(kind)
    task = TaskConfig(name="chain_sum", num_train=4, num_val=2)
    data = DataConfig(apply_chat_template=apply_chat_template, train_files=("p.jsonl",))
    tasks = load_task(task, data, tokenizer, seed=0)
    texts = [
        p.row["entry"]["metadata"]["expression"].replace(" ", "") + "="
        for p in (*tasks.train, *tasks.val)
    ]
    expected = [
        by_transformers(tokenizer, t, applies_template=apply_chat_template == "auto") for t in texts
    ]
    assert [list(p.token_ids) for p in (*tasks.train, *tasks.val)] == expected
    if "bos" in kind:
        bos = tokenizer.bos_token_id
        is_in_template = apply_chat_template == "auto" and "template" in kind
        assert {ids.count(bos) for ids in expected} == {
            1 if not is_in_template or "in template" in kind else 0
        }

    monkeypatch.chdir(tmp_path)
    write_rows(Path("p.jsonl"), [{"prompt": text} for text in texts])
    files = load_files(data, tokenizer, seed=0)
    assert [list(p.token_ids) for p in files.train] == expected

    config = TrainConfig(data=data)
    assert asked_by_sample(tokenizer, config, texts[0], monkeypatch) == expected[0]

    encoder = Encoder(
        tokenizer, eos_token_ids=[1], apply_chat_template=apply_chat_template == "auto"
    )
    if encoder.makes_messages:
        messages = [{"role": "user", "content": texts[0]}, {"role": "assistant", "content": "7"}]
        tokens = encoder.conversation(messages, "row 1", num_given=1)
    else:
        tokens = encoder.completion(texts[0], "7")
    assert tokens.ids[: tokens.num_given].tolist() == expected[0]


def test_text_that_has_its_bos_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user's own script rendered it, to be trained on as it is."""
    tokenizer = tokenizer_of("bos, bos in template")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1+1="}], tokenize=False)
    monkeypatch.chdir(tmp_path)
    write_rows(Path("p.jsonl"), [{"prompt": text}])
    data = DataConfig(apply_chat_template="never", train_files=("p.jsonl",))
    (prompt,) = load_files(data, tokenizer, seed=0).train
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert list(prompt.token_ids) == expected
    assert asked_by_sample(tokenizer, TrainConfig(data=data), text, monkeypatch) == expected
    tokens = Encoder(tokenizer, eos_token_ids=[1], apply_chat_template=False).completion(text, "7")
    assert tokens.ids[: tokens.num_given].tolist() == expected
    whole = Encoder(tokenizer, eos_token_ids=[1], apply_chat_template=False).text(text, "row 1")
    assert whole.ids.tolist() == [*expected, 1]


def test_messages_as_parquet_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are None are no keys, parts of text are text, and variables of the template are settings."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ mode }}" + TEMPLATE.replace(
        "['content'] }}", "['content'] }}{{ m.keys() | length }}"
    )
    monkeypatch.chdir(tmp_path)
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    chats = [
        [{"role": "user", "content": "1+1=", "name": None, "tool_calls": None}],
        [{"role": "user", "content": parts, "tool_calls": None}],
    ]
    write_rows(Path("p.jsonl"), [{"prompt": chat} for chat in chats])
    data = DataConfig(train_files=("p.jsonl",), chat_template_kwargs={"mode": "think"})
    texts = {prompt.text for prompt in load_files(data, tokenizer, seed=0).train}
    assert texts == {"think<user>1+1=2</user><assistant>"}
    with pytest.raises(UserError, match=r"data.chat_template_kwargs is .*; expected none of add_"):
        DataConfig(chat_template_kwargs={"tokenize": True})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a\ud800", "it has a lone surrogate, '\\ud800' at character 2; expected Unicode text"),
        ([{"role": "user", "content": "\ud800"}], "message 1.content has a lone surrogate"),
        ([{"role": "user", "content": None}], "message 1.content is None; expected text"),
        (
            [{"role": "user", "content": 7}],
            "message 1.content is 7; expected text, or a list of parts of type text",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 1.content has an image; expected text alone",
        ),
        ([{"role": 7, "content": "a"}], "message 1 has the role 7; expected text, such as 'user'"),
    ],
)
def test_prompts_without_a_meaning(
    prompt: object, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(Path("p.jsonl"), [{"prompt": "fine"}, {"prompt": prompt}])
    with pytest.raises(UserError, match=re.escape(f"p.jsonl: prompt of row 2: {expected}")):
        load_files(DataConfig(train_files=("p.jsonl",)), tokenizer_of("template"), seed=0)


def test_what_a_model_takes(tmp_path: Path, tiny: Path) -> None:
    """Prompts and responses within it are asked of vLLM, whatever data.max_prompt_length says."""
    GPT2Config(n_positions=96).save_pretrained(tmp_path / "gpt2")
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1e4,
    }
    Qwen3Config(max_position_embeddings=64, rope_parameters=yarn).save_pretrained(tmp_path / "yarn")
    BloomConfig().save_pretrained(tmp_path / "bloom")
    assert longest_sequence(tmp_path / "gpt2") == 96
    assert longest_sequence(tmp_path / "yarn") == 256
    assert longest_sequence(tmp_path / "bloom") is None
    assert longest_sequence(tiny) == longest_sequence(None) == 512
    for max_prompt_length, expected in ((1024, 512), (100, 140)):
        data = DataConfig(max_prompt_length=max_prompt_length, max_response_length=40)
        config = TrainConfig(data=data, rollout=RolloutConfig(engine="vllm"), dtype="float32")
        make: Any = engine_factory(config.rollout, config, tiny, eos_token_ids=[1])
        assert make.keywords["max_model_len"] == expected


@pytest.mark.parametrize("model", ["", "gpt2"])
def test_prompts_that_the_model_does_not_take(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    limit = 96 if model else 512
    if model:
        GPT2Config(n_positions=limit).save_pretrained(model)
    prompt = Prompt(text="", token_ids=(3,) * (limit - 40), row={})
    prompts = PromptSets(train=[prompt], val=[], num_too_long=0, longest=len(prompt.token_ids))
    check_lengths(TrainConfig(model=model, data=DataConfig(max_response_length=40)), prompts)
    expected = (
        f"data.max_response_length is 41; expected at most 40: the longest prompt has {limit - 40} tokens and the "
        f"model takes at most {limit} together (model is {model!r}, max_position_embeddings); a lower "
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        check_lengths(TrainConfig(model=model, data=DataConfig(max_response_length=41)), prompts)


def test_prompts_that_the_critic_does_not_take(tmp_path: Path) -> None:
    GPT2Config(n_positions=32).save_pretrained(tmp_path)
    prompts = PromptSets(
        train=[Prompt(text="", token_ids=(3,), row={})], val=[], num_too_long=0, longest=1
    )
    config = TrainConfig(
        critic=CriticConfig(model=str(tmp_path)),
        algorithm=AlgorithmConfig(adv_estimator="gae"),
        data=DataConfig(max_response_length=40),
    )
    with pytest.raises(UserError, match=r"the model takes at most 32 together \(critic.model is "):
        check_lengths(config, prompts)
