"""Chat templates that loop or grow without end are refused when the tokenizer is loaded, before anything renders."""

from pathlib import Path

import pytest

from gcore_llm.tiny_model import tiny_tokenizer
from gcore_runs import UserError, build_tokenizer
from gcore_runs.data import chat_template

TOO_LONG = (
    r"has a chat template that did not answer within 0\.5 s on a conversation of 3 messages; "
    r"expected at most 0\.5 s"
)
TOO_LARGE = (
    "has a chat template that took more than 0.125 GiB of memory on a conversation of 3 messages; "
    "expected at most"
)
POWER = "{{ 9 ** (9 ** 9) }}"
NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


def save_tokenizer(folder: Path, template: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


@pytest.fixture(autouse=True)
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_CALL_S", 0.5)
    monkeypatch.setattr(chat_template, "_MEMORY_BYTES", 1 << 27)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (POWER, TOO_LONG),
        (NESTED, TOO_LONG),
        ("{{ 'x' * 10**12 }}", TOO_LARGE),
        (DOUBLED, TOO_LARGE),
    ],
)
def test_a_template_without_end_is_refused(template: str, message: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template)
    with pytest.raises(UserError, match=f"model folder {tmp_path} {message}"):
        build_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% generation %}{{ m | tojson(ensure_ascii=False) }}{% endgeneration %}{% endfor %}",
        "{{ raise_exception('only system messages, ' ~ strftime_now('%Y')) }}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% unknown %}",
    ],
)
async def test_other_templates_load(template: str, tmp_path: Path) -> None:
    """Their own errors, such as that of Jinja's sandbox for a long range, come from the first use."""
    save_tokenizer(tmp_path, template)
    tokenizer = build_tokenizer(tmp_path)
    assert tokenizer.chat_template == template
