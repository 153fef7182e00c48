"""Images in conversations: their tokens and pixels are those of transformers' processor for the whole conversation."""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings, strategies as st
from tiny_vision_model import IMAGE, noise, save_vision_model
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

from gcore_agents import (
    CallError,
    ChatCall,
    ChatEncoder,
    MessageError,
    Opening,
    Reply,
    SampledTokens,
    ServerSampler,
    Session,
    SessionBudget,
    SessionJournal,
    choose_trained,
    collect_tokens,
    restore_session,
    run_episode,
)
from gcore_agents.calls import ChatReply
from gcore_agents.chat.images import join_parts
from gcore_agents.dialects.anthropic import AnthropicDialect
from gcore_agents.dialects.chat_completions import ChatCompletionsDialect
from gcore_agents.dialects.dialect import Dialect
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.dialects.google import GoogleDialect
from gcore_agents.dialects.images import MAX_IMAGE_BYTES, MAX_PIXELS
from gcore_agents.dialects.responses import ResponsesDialect
from gcore_agents.session_api import describe_graph, tokenize
from gcore_rollout import PromptImages, VisionProcessor

# The first two have as many tokens.
WIDE, TALL, SMALL = noise(56, 84, 0), noise(90, 60, 1), noise(30, 30, 2)
NUMBERED = """
{%- set images = namespace(count=0) %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.content is string %}{{ m.content }}{% else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}
                {%- set images.count = images.count + 1 %}
                {{- 'Picture ' ~ images.count ~ ': <|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{ part.text }}{% endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Counts the images of the conversation, as Qwen's template does with ``add_vision_id``."""


@dataclass
class SeeingSampler:
    """Answers with texts, the last one again and again, and records what it was given."""

    tokenizer: Any
    texts: Sequence[str] = ("ok",)
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    images: list[list[bytes]] = field(default_factory=list[list[bytes]])
    starts: list[list[int]] = field(default_factory=list[list[int]])

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[bytes] = (),
        image_starts: Sequence[int] = (),
        **options: Any,
    ) -> SampledTokens:
        del options
        text = self.texts[min(len(self.prompts), len(self.texts) - 1)]
        self.prompts.append(list(prompt_ids))
        self.images.append(list(images))
        self.starts.append(list(image_starts))
        tokens = self.tokenizer(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        zeros = [0] * len(tokens)
        return SampledTokens(
            token_ids=tokens,
            log_probs=[0.0] * len(tokens),
            weight_versions=zeros,
            finish_reason="stop",
        )


@dataclass
class Vision:
    """The folder of a tiny model, and transformers' processor of it."""

    folder: Path
    oracle: Any
    processor: VisionProcessor

    def make_session(self, *texts: str, template: str | None = None) -> Session:
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        tokenizer.chat_template = template or tokenizer.chat_template
        return Session(
            session_id="s",
            sampler=SeeingSampler(tokenizer, texts or ("ok",)),
            encoder=ChatEncoder(tokenizer, vision=self.processor),
            budget=SessionBudget(max_tokens=100_000),
        )

    def process(self, messages: Sequence[Mapping[str, Any]], template: str | None = None) -> Any:
        """Return what transformers makes of a whole conversation."""
        decoded: list[dict[str, Any]] = []
        for message in messages:
            content: Any = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            parts: list[Any] = []
            for part in content:
                if part["type"] == "image":
                    part = {"type": "image", "image": PIL.Image.open(io.BytesIO(part["image"]))}
                parts.append(part)
            decoded.append({"role": message["role"], "content": parts})
        return self.oracle.apply_chat_template(
            decoded,
            chat_template=template,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            return_tensors="np",
        )


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Vision:
    folder = save_vision_model(tmp_path_factory.mktemp("vision") / "model", "qwen2_5_vl")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    oracle = Qwen2_5_VLProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )
    return Vision(folder, oracle, VisionProcessor.from_pretrained(folder))


def user(*parts: str | bytes) -> dict[str, Any]:
    return {"role": "user", "content": join_parts(parts)}


async def ask(session: Session, *messages: Mapping[str, Any]) -> ChatReply:
    replies = await session.respond(ChatCall(messages=messages))
    session.mark_delivered(replies)
    return replies[0]


PICTURES = {"wide": WIDE, "tall": TALL, "small": SMALL}
PARTS = st.lists(st.sampled_from([*PICTURES, "a", "b"]), min_size=1, max_size=4)


@pytest.mark.parametrize("template", [None, NUMBERED])
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(PARTS, min_size=1, max_size=4))
async def test_tokens_and_pixels_are_those_of_the_whole_conversation(
    vision: Vision, template: str | None, turns: list[list[str]]
) -> None:
    session = vision.make_session(template=template)
    sampler: Any = session.sampler
    messages: list[Mapping[str, Any]] = []
    for parts in turns:
        messages.append(user(*(PICTURES.get(part, part) for part in parts)))
        reply = await ask(session, *messages)
        expected = vision.process(messages, template)
        tokens = sampler.prompts[-1]
        assert tokens == expected["input_ids"][0].tolist()
        assert reply.prompt_tokens == len(tokens)
        images = tuple(sampler.images[-1])
        starts = [i for i, t in enumerate(tokens) if t == IMAGE and tokens[i - 1] != IMAGE]
        assert sampler.starts[-1] == starts
        if images:
            pixels = PromptImages(model=str(vision.folder), sources=images).pixels()
            np.testing.assert_array_equal(pixels.pixel_values, expected["pixel_values"])
            np.testing.assert_array_equal(pixels.grid_thw, expected["image_grid_thw"])
        messages.append(reply.message)
    # A conversation is one branch, and all of its images are in its tree, in the order of their places.
    tree = collect_tokens(session.graph, trained=choose_trained(session))
    assert tree is not None
    assert not tree.forks.size
    assert (tree.images, tree.image_starts) == (sampler.images[-1], sampler.starts[-1])


async def test_other_pixels_begin_a_branch_and_equal_files_do_not(vision: Vision) -> None:
    session = vision.make_session()
    sampler: Any = session.sampler
    first = await ask(session, user(WIDE, "?"))
    await ask(session, user(WIDE, "?"), first.message, user(TALL))
    await ask(session, user(WIDE, "?"), first.message, user(SMALL))
    await ask(session, user(TALL, "?"), first.message, user(SMALL))
    assert sampler.images == [[WIDE], [WIDE, TALL], [WIDE, SMALL], [TALL, SMALL]]
    graph = session.graph
    # The tokens of the wide image and of the tall one are equal.
    assert graph.nodes[0].token_ids == graph.root.children[1].token_ids[: graph.nodes[0].num_tokens]
    assert len(graph.root.children) == 2
    tree = collect_tokens(graph, trained=choose_trained(session))
    assert tree is not None
    tokens = [*tree.prompt_ids.tolist(), *tree.token_ids.tolist()]
    assert tree.images == [WIDE, TALL, SMALL, TALL, SMALL]
    for image, start in zip(tree.images, tree.image_starts, strict=True):
        size = vision.processor.num_tokens(image)
        assert tokens[start : start + size] == [IMAGE] * size
        assert IMAGE not in (tokens[start - 1], tokens[start + size])


async def test_an_image_token_that_the_policy_wrote_is_no_image(vision: Vision) -> None:
    session = vision.make_session("I see <|image_pad|>", "ok")
    sampler: Any = session.sampler
    first = await ask(session, user(WIDE))
    await ask(session, user(WIDE), first.message, user(SMALL))
    tokens = sampler.prompts[-1]
    assert tokens.count(IMAGE) == 6 + 1 + 1
    assert [tokens[start - 1] for start in sampler.starts[-1]] == [
        tokens[sampler.starts[0][0] - 1]
    ] * 2
    with pytest.raises(CallError, match="texts may not have the token that stands for an image"):
        await ask(session, user(WIDE), first.message, user(SMALL, "<|image_pad|>"))


async def test_a_journal_and_the_graph_s_route_have_the_images(
    vision: Vision, tmp_path: Path
) -> None:
    session = vision.make_session()
    first = await ask(session, user("Look: ", WIDE))
    await ask(session, user("Look: ", WIDE), first.message, user(TALL, "?"))
    journal = SessionJournal(tmp_path, num_steps=1)
    journal.add("key", session, step=0, version=0, turns=["ok"])
    journal.close()
    record = SessionJournal(tmp_path, num_steps=1).find("key", step=0)
    assert record is not None
    restored = vision.make_session()
    restore_session(restored, record, version=0)
    for graph in (session.graph, restored.graph):
        tree = collect_tokens(graph, trained=set(graph.turns()))
        assert tree is not None
        assert tree.images == [WIDE, TALL]
    nodes = json.loads(json.dumps(describe_graph(session, JsonFields({}))))["nodes"]
    [digest] = [p["image"] for p in nodes[0]["messages"][0]["content"] if p["type"] == "image"]
    assert len(digest) == 64


def encode(image: bytes) -> str:
    return base64.b64encode(image).decode()


def chat_body(image: bytes, *, role: str = "user", mime: str = "image/png") -> dict[str, Any]:
    url = f"data:{mime};base64,{encode(image)}"
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    content = [{"type": "text", "text": "a"}, part]
    return {"messages": [{"role": role, "content": content, "tool_call_id": "x"}]}


def responses_body(image: bytes, *, role: str = "user", mime: str = "image/png") -> dict[str, Any]:
    part = {"type": "input_image", "image_url": f"data:{mime};base64,{encode(image)}"}
    content = [{"type": "input_text", "text": "a"}, part]
    if role == "tool":
        return {"input": [{"type": "function_call_output", "call_id": "x", "output": content}]}
    return {"input": [{"role": role, "content": content}]}


def anthropic_body(image: bytes, *, role: str = "user", mime: str = "image/png") -> dict[str, Any]:
    source = {"type": "base64", "media_type": mime, "data": encode(image)}
    content: list[Any] = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    if role == "tool":
        content = [{"type": "tool_result", "tool_use_id": "x", "content": content}]
        role = "user"
    return {"messages": [{"role": role, "content": content}], "max_tokens": 9}


def google_body(image: bytes, *, role: str = "user", mime: str = "image/png") -> dict[str, Any]:
    part = {"inline_data": {"mime_type": mime, "data": encode(image)}}
    parts: list[Any] = [{"text": "a"}, part]
    if role == "tool":
        response = {"name": "x", "response": {"output": "a"}, "parts": [part]}
        parts = [{"functionResponse": response}]
    return {"contents": [{"role": "user", "parts": parts}]}


APIS: list[tuple[type[Dialect], Callable[..., dict[str, Any]], str]] = [
    (ChatCompletionsDialect, chat_body, "messages[0].content[1].image_url.url"),
    (ResponsesDialect, responses_body, "input[0].content[1].image_url"),
    (AnthropicDialect, anthropic_body, "messages[0].content[1].source.data"),
    (GoogleDialect, google_body, "contents[0].parts[1].inlineData.data"),
]


@pytest.mark.parametrize(("kind", "make_body", "field"), APIS)
def test_every_api_has_images_of_users_and_results(
    vision: Vision, kind: type[Dialect], make_body: Callable[..., dict[str, Any]], field: str
) -> None:
    dialect = kind(vision.make_session())
    content = [{"type": "text", "text": "a"}, {"type": "image", "image": WIDE}]
    for role in ("user", "tool"):
        [message] = dialect.read_call(make_body(WIDE, role=role)).messages
        assert (message["role"], message["content"]) == (role, content)
    [message] = dialect.read_call(make_body(jpeg(), mime="image/jpeg")).messages
    assert message["content"][1]["image"] == jpeg()


def jpeg() -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (40, 40), "red").save(file, "JPEG")
    return file.getvalue()


def bomb() -> bytes:
    """A small file that decodes to more pixels than are taken."""
    file = io.BytesIO()
    PIL.Image.new("1", (4096, MAX_PIXELS // 4096 + 1)).save(file, "PNG")
    return file.getvalue()


BAD = [
    (b"GIF89a but no more", "image/gif", "is no image that the model takes"),
    (WIDE[: len(WIDE) // 2], "image/png", "is no image that the model takes"),
    (b"%!PS-Adobe-3.0 EPSF-3.0", "image/png", "expected a file of the type image/png"),
    (b"\x89PNG\r\n\x1a\n" + bytes(MAX_IMAGE_BYTES), "image/png", "an image of up to 16 MiB"),
    (bomb(), "image/png", f"expected at most {MAX_PIXELS}"),
    (noise(2, 500, 0), "image/png", "aspect ratio"),
]


@pytest.mark.parametrize(("kind", "make_body", "field"), APIS)
@pytest.mark.parametrize(("image", "mime", "message"), BAD)
def test_bad_images_are_refused_by_field(
    vision: Vision,
    kind: type[Dialect],
    make_body: Callable[..., dict[str, Any]],
    field: str,
    image: bytes,
    mime: str,
    message: str,
) -> None:
    dialect = kind(vision.make_session())
    with pytest.raises(CallError, match=message) as raised:
        dialect.read_call(make_body(image, mime=mime))
    assert (raised.value.field, raised.value.status) == (field, 400)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(("kind", "make_body", "field"), APIS)
def test_unknown_types_and_models_without_vision_are_refused_by_field(
    vision: Vision, kind: type[Dialect], make_body: Callable[..., dict[str, Any]], field: str
) -> None:
    session = vision.make_session()
    with pytest.raises(CallError, match="expected image/png or image/jpeg or") as raised:
        kind(session).read_call(make_body(WIDE, mime="image/tiff"))
    assert raised.value.field.startswith(field.rpartition(".")[0])
    session.encoder = ChatEncoder(AutoTokenizer.from_pretrained(vision.folder))
    with pytest.raises(CallError, match=r"expected .*text") as raised:
        kind(session).read_call(make_body(WIDE))
    assert raised.value.field
    assert field.startswith(raised.value.field.removesuffix(".type"))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"type": "image_url"}, "image_url"),
        ({"type": "image_url", "image_url": {}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "https://localhost/a.png"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "image_url.url"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,%"}}, "image_url.url"),
    ],
)
def test_nothing_is_fetched(vision: Vision, body: dict[str, Any], field: str) -> None:
    dialect = ChatCompletionsDialect(vision.make_session())
    with pytest.raises(CallError) as raised:
        dialect.read_call({"messages": [{"role": "user", "content": [body]}]})
    assert raised.value.field == f"messages[0].content[0].{field}"


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_others_show_no_images(vision: Vision, role: str) -> None:
    for kind, make_body in (
        (ChatCompletionsDialect, chat_body),
        (ResponsesDialect, responses_body),
    ):
        with pytest.raises(CallError, match=r"expected .*text") as raised:
            kind(vision.make_session()).read_call(make_body(WIDE, role=role))
        assert raised.value.field.endswith("content[1].type")


async def test_a_server_that_takes_tokens_alone_is_not_asked(vision: Vision) -> None:
    session = vision.make_session()
    session.sampler = ServerSampler("http://127.0.0.1:1/v1", "model")
    with pytest.raises(CallError, match="messages have 1 images; expected text") as raised:
        await ask(session, user(WIDE))
    assert (raised.value.status, raised.value.field) == (400, "messages")


def test_tokenize_counts_images(vision: Vision) -> None:
    body = JsonFields(chat_body(WIDE))
    assert tokenize(vision.make_session(), body)["tokens"].count(IMAGE) == 6


async def test_tokens_do_not_continue_images(vision: Vision) -> None:
    session = vision.make_session()
    await ask(session, user(WIDE))
    tokens = tuple(session.graph.nodes[0].token_ids)
    with pytest.raises(CallError, match="prompt continues messages with images"):
        await session.respond(ChatCall(messages=(), prompt_ids=(*tokens, 40)))


def test_images_without_bytes_or_a_template_are_refused(vision: Vision) -> None:
    encoder = vision.make_session().encoder
    with pytest.raises(MessageError, match="an image is None; expected the bytes of an image file"):
        encoder.first([{"role": "user", "content": [{"type": "image"}]}])
    blind = "{% for m in messages %}{{ m.content if m.content is string else '' }}{% endfor %}"
    encoder = vision.make_session(template=blind).encoder
    with pytest.raises(MessageError, match="a prompt has 1 images; expected 0"):
        encoder.first([user(WIDE)])


class Gallery:
    """Shows a picture, and another after the first answer."""

    async def reset(self) -> Opening:
        return Opening(messages=[user(WIDE, "What?")])

    async def step(self, completion: str) -> Reply:
        del completion
        return Reply(messages=[user(SMALL, "And?")], done=False)


async def test_an_environment_shows_pictures(vision: Vision) -> None:
    session = vision.make_session()
    session.budget = SessionBudget(max_tokens=1000, max_calls=2)
    sampler: Any = session.sampler
    await run_episode(session, Gallery(), timeout_s=10)
    assert sampler.images == [[WIDE], [WIDE, SMALL]]
