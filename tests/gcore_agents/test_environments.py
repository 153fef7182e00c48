"""Episodes of several turns: exact tokens, masks, log-probs, tools, and what goes wrong in them."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from engine_oracles import EOS_TOKEN_IDS, VOCAB_SIZE, TinyModel
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from gcore_agents import (
    ChatEncoder,
    MessageError,
    Opening,
    Reply,
    RevisionEnvironment,
    Tool,
    ToolEnvironment,
    render_chat,
)
from gcore_agents.chat.tool_calls import ToolCall, read_calls, read_hermes
from gcore_llm.agents.config import MultiTurnConfig
from gcore_llm.agents.episodes import EpisodePlayer, run_environment
from gcore_rollout import (
    Completion,
    EngineStats,
    EpisodeError,
    HFEngine,
    Prompt,
    Request,
    SamplingParams,
)
from gcore_runs import UserError

_LIMITS = MultiTurnConfig()
START, END = "<|start|>", "<|end|>"
# Of assistants' turns only those behind the last question keep their reasoning, as in Qwen3's template.
TEMPLATE = """
{%- set last = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|start|>system ' + tools | map(attribute='function.name') | join(',') + '<|end|>\n' }}{% endif %}
{%- for m in messages %}
    {{- '<|start|>' + m.role + ' ' }}
    {%- if m.role == 'assistant' and loop.index0 > last.question %}{{ 'thinking ' }}{% endif %}
    {{- m.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant ' }}{% endif %}"""


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Characters, and `ab` as one token, so that text can be written in more than one way."""
    characters = (
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 \n.,:;!?'_-+*/=(){}[]<>\""
    )
    tokens = ["<pad>", END, START, "<unk>", "ab", "<eos>", *characters]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    assert len(vocabulary) <= VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token=END,
        pad_token="<pad>",
        additional_special_tokens=[START],
        chat_template=template,
    )


@dataclass
class ScriptedEngine:
    """Answers with given tokens, one turn after the other."""

    turns: Sequence[Sequence[int]]
    finish_reasons: Sequence[Any] = ()
    requests: list[Request] = field(default_factory=list)
    weight_version = 3

    async def generate(self, requests: Sequence[Request]) -> AsyncGenerator[Completion]:
        [request] = requests
        tokens = np.array(self.turns[len(self.requests)], np.int64)
        reason = self.finish_reasons[len(self.requests)] if self.finish_reasons else "stop"
        self.requests.append(request)
        await asyncio.sleep(0)
        yield Completion(
            request_id=request.request_id,
            index=0,
            token_ids=tokens,
            log_probs=np.full(tokens.size, -0.5, np.float32),
            weight_versions=np.full(tokens.size, self.weight_version, np.int32),
            finish_reason=reason,
        )

    async def abort(self, request_ids: Sequence[str] | None = None) -> None: ...
    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def sleep(self, *, keep_weights: bool = True) -> None: ...
    async def wake(self, *, weights: bool = True, cache: bool = True) -> None: ...
    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int
    ) -> None: ...
    async def close(self) -> None: ...

    def stats(self) -> EngineStats:
        raise AssertionError("no episode asks for them")


@dataclass
class Questions:
    """Asks one thing after the other, and rewards every answer with 1."""

    texts: Sequence[str]
    role: str = "user"
    heard: list[str] = field(default_factory=list)

    async def reset(self) -> Opening:
        return Opening(messages=[{"role": "user", "content": self.texts[0]}])

    async def step(self, completion: str) -> Reply:
        self.heard.append(completion)
        if len(self.heard) == len(self.texts):
            return Reply(reward=1.0, done=True)
        return Reply(
            messages=[{"role": self.role, "content": self.texts[len(self.heard)]}], reward=1.0
        )


SAMPLING = SamplingParams(max_tokens=200)


async def run_episode(
    engine: Any,
    environment: Any,
    encoder: ChatEncoder,
    *,
    request_id: str,
    sampling: SamplingParams,
    limits: MultiTurnConfig = _LIMITS,
    seed: int = 0,
) -> Completion:
    """Play an episode as a run does."""
    player = EpisodePlayer(
        drive=partial(run_environment, lambda _: environment, limits.step_timeout_s),
        encoder=encoder,
        multi_turn=limits,
        max_context=0,
        credit=None,
        timeout_s=0.0,
        needs_score=False,
    )
    prompt = Prompt(text="", token_ids=(1,), row={})
    return await player.play(engine, prompt, request_id, sampling, seed)


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


async def test_tokens_stay_as_they_were_sampled() -> None:
    """`a` and `b` are not joined to `ab`, and the environment's words stand where the template has them."""
    tokenizer = make_tokenizer()
    a, b, end = (tokenizer.convert_tokens_to_ids(t) for t in ("a", "b", END))
    engine = ScriptedEngine([[a, b, end], [b, end]])
    world = Questions(["x", "abc"])
    episode: Any = await run_episode(
        engine, world, ChatEncoder(tokenizer), request_id="e", sampling=SAMPLING
    )
    assert encoded(tokenizer, "ab") != [a, b]
    assert world.heard == ["ab", "b"]
    assert episode.prompt_ids.tolist() == encoded(
        tokenizer, "<|start|>user x<|end|>\n<|start|>assistant "
    )
    said = encoded(tokenizer, "\n<|start|>user abc<|end|>\n<|start|>assistant ")
    assert episode.token_ids.tolist() == [a, b, end, *said, b, end]
    written = [True] * 3 + [False] * len(said) + [True] * 2
    assert episode.mask.tolist() == written
    assert episode.log_probs.tolist() == [-0.5 if w else 0 for w in written]
    assert episode.weight_versions.tolist() == [3 if w else -1 for w in written]
    assert (episode.turns, episode.score, episode.end) == (("ab", "b"), 2.0, "done")
    first, second = engine.requests
    assert second.prompt_token_ids == (*first.prompt_token_ids, a, b, end, *said)
    assert first.seed != second.seed


@pytest.mark.parametrize("role", ["user", "tool"])
def test_further_messages_are_rendered_as_the_template_would(role: str) -> None:
    """Whatever it does to earlier turns."""
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer)
    message = {"role": role, "content": "seen"}
    behind = f"\n<|start|>{role} seen<|end|>\n<|start|>assistant "
    assert encoder.next([message], last_token=tokenizer.eos_token_id) == encoded(tokenizer, behind)
    # Of a turn that ended with another token than the template's, the end is added.
    assert encoder.next([message], last_token=5) == encoded(tokenizer, END + behind)


def test_without_a_template_contents_follow_each_other() -> None:
    tokenizer = make_tokenizer(None)
    encoder = ChatEncoder(tokenizer)
    assert encoder.first([{"role": "user", "content": "1+1="}]) == encoded(tokenizer, "1+1=")
    assert encoder.next([{"role": "user", "content": " no"}], last_token=1) == encoded(
        tokenizer, " no"
    )
    with pytest.raises(
        MessageError, match="the tokenizer has no chat template that could announce them"
    ):
        encoder.first([{"role": "user", "content": "1+1="}], tools=[{"type": "function"}])


def test_conversations_have_no_images() -> None:
    encoder = ChatEncoder(make_tokenizer())
    with pytest.raises(MessageError, match=r"message 1\.content has an image; expected text alone"):
        encoder.first([{"role": "user", "content": [{"type": "image"}]}])


def test_a_template_that_cannot_continue_is_refused() -> None:
    tokenizer = make_tokenizer(
        "{{ messages | length }}{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    )
    with pytest.raises(MessageError, match="does not render messages of user after the policy's"):
        ChatEncoder(tokenizer).next([{"role": "user", "content": "x"}], last_token=1)


def test_a_template_that_fails_is_one_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(
        MessageError, match="the chat template refuses the messages: division by zero"
    ):
        ChatEncoder(tokenizer).first([{"role": "user", "content": "x"}])


async def test_log_probs_are_those_of_the_whole_sequence(tied: TinyModel) -> None:
    """By transformers, in one forward pass over all turns; concurrent episodes do not disturb each other."""
    tokenizer = make_tokenizer()
    engine = HFEngine.from_pretrained(tied.path, eos_token_ids=EOS_TOKEN_IDS)
    limits = MultiTurnConfig(max_tokens_per_turn=40)
    episodes: list[Any] = await asyncio.gather(
        *(
            run_episode(
                engine,
                Questions([f"{i}?", "and?", "so?"]),
                ChatEncoder(tokenizer),
                request_id=str(i),
                sampling=SamplingParams(max_tokens=150),
                limits=limits,
                seed=i,
            )
            for i in range(12)
        )
    )
    assert max(len(e.turns) for e in episodes) > 1
    for episode in episodes:
        ids = torch.from_numpy(np.concatenate([episode.prompt_ids, episode.token_ids]))
        logits_RV = tied.old(input_ids=ids[None]).logits[0, episode.prompt_ids.size - 1 : -1]
        expected = logits_RV.log_softmax(-1).gather(
            1, torch.from_numpy(episode.token_ids)[:, None]
        )[:, 0]
        mask = episode.mask
        np.testing.assert_allclose(episode.log_probs[mask], expected.numpy()[mask], atol=1e-4)
        assert not episode.log_probs[~mask].any()
    await engine.close()


async def test_an_aborted_turn_continues() -> None:
    engine = ScriptedEngine([[7, 8], [7, 8, 9, 1]], ["abort", "stop"])
    encoder = ChatEncoder(make_tokenizer())
    episode: Any = await run_episode(
        engine, Questions(["x"]), encoder, request_id="e", sampling=SAMPLING
    )
    assert episode.token_ids.tolist() == [7, 8, 9, 1]
    [cut_short] = engine.requests[1].prefixes
    assert cut_short.token_ids.tolist() == [7, 8]
    assert engine.requests[0].request_id == engine.requests[1].request_id


@pytest.mark.parametrize(
    ("limits", "max_tokens", "reasons", "end", "turns"),
    [
        (MultiTurnConfig(max_assistant_turns=2), 200, [], "max_turns", 2),
        (MultiTurnConfig(), 4, [], "length", 1),
        (MultiTurnConfig(), 3, ["length"], "length", 1),
        (MultiTurnConfig(max_tokens_per_turn=3), 200, ["stop", "length"], "truncated_turn", 2),
        (MultiTurnConfig(), 200, ["repetition"], "truncated_turn", 1),
    ],
)
async def test_episodes_end(
    limits: MultiTurnConfig, max_tokens: int, reasons: list[str], end: str, turns: int
) -> None:
    """With what the policy wrote last: no turn reads what would have been said to it."""
    engine = ScriptedEngine([[7, 8, 1]] * 4, reasons)
    episode: Any = await run_episode(
        engine,
        Questions(["x"] * 4),
        ChatEncoder(make_tokenizer()),
        request_id="e",
        sampling=SamplingParams(max_tokens=max_tokens),
        limits=limits,
    )
    assert (episode.end, len(episode.turns), episode.score) == (end, turns, turns)
    assert episode.mask[-3:].all()
    assert engine.requests[0].sampling.max_tokens == min(
        max_tokens, limits.max_tokens_per_turn or max_tokens
    )


async def test_an_environment_is_notified_of_a_truncated_turn() -> None:
    """If its step has the parameter."""
    seen: list[bool] = []

    class Aware(Questions):
        async def step(self, completion: str, truncated: bool = False) -> Reply:
            seen.append(truncated)
            return await super().step(completion)

    await run_episode(
        ScriptedEngine([[7, 8, 1], [7, 8, 9]], ["stop", "length"]),
        Aware(["x"] * 4),
        ChatEncoder(make_tokenizer()),
        request_id="e",
        sampling=SamplingParams(max_tokens=200),
        limits=MultiTurnConfig(max_tokens_per_turn=3),
    )
    assert seen == [False, True]


async def test_broken_environments_are_reported() -> None:
    class Broken(Questions):
        async def step(self, completion: str) -> Reply:
            del completion
            if self.texts[0] == "slow":
                await asyncio.sleep(60)
            if self.texts[0] == "nan":
                return Reply(done=True, reward=float("nan"))
            raise KeyError("board")

    for text, message in {
        "broken": "episode 'e': step 1: KeyError: 'board'",
        "slow": "episode 'e': step 1 took longer than 0.5 s",
        "nan": "episode 'e': step 1: the reward is nan; expected a finite number",
    }.items():
        with pytest.raises(EpisodeError, match=re.escape(message)):
            await run_episode(
                ScriptedEngine([[7, 1]]),
                Broken([text]),
                ChatEncoder(make_tokenizer()),
                request_id="e",
                sampling=SAMPLING,
                limits=MultiTurnConfig(step_timeout_s=0.5),
            )


def test_bad_settings_are_refused() -> None:
    with pytest.raises(UserError, match="max_assistant_turns is 0; expected 1 or more"):
        MultiTurnConfig(max_assistant_turns=0)
    with pytest.raises(
        ValueError, match="expected one or more in a reply that does not end the episode"
    ):
        Reply(reward=1.0)
    with pytest.raises(ValueError, match="expected one or more at the start of an episode"):
        Opening(messages=[])


async def add(a: int, b: int) -> int:
    return a + b


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [
    Tool(name="add", description="Adds.", function=add, parameters=INTEGERS),
    Tool(
        name="sleep",
        description="Sleeps.",
        function=sleep,
        parameters={"type": "object"},
        timeout_s=0.5,
    ),
]


async def test_tools_answer_the_calls_of_a_turn() -> None:
    """All of them, in their order; what is wrong with a call is said to the policy."""
    world = ToolEnvironment(
        [{"role": "user", "content": "?"}], TOOLS, reward=lambda text: float(text == "5")
    )
    turn = "".join(
        f"<tool_call>\n{call}\n</tool_call>"
        for call in (
            '{"name": "add", "arguments": {"a": 2, "b": 3}}',
            '{"name": "sleep", "arguments": {"seconds": 9}}',
            '{"name": "add", "arguments": {"a": 2}}',
            '{"name": "mul", "arguments": {}}',
            '{"name": "add"',
            '{"name": 3}',
        )
    )
    reply = await world.step(turn)
    answers = [m["content"] for m in reply.messages]
    assert answers[:2] == ["5", "error: sleep took longer than 0.5 s"]
    assert answers[2].startswith(
        "error: TypeError: add() missing 1 required positional argument: 'b'"
    )
    assert answers[3] == "error: there is no tool 'mul': there are add, sleep"
    assert answers[4].startswith("error: the call is not JSON: ")
    assert answers[5] == "error: a call is an object with a name and an object of arguments"
    assert [m["role"] for m in reply.messages] == ["tool"] * 6
    assert await world.step("5") == Reply(reward=1.0, done=True)
    assert await world.step("6") == Reply(reward=0.0, done=True)


async def test_long_answers_are_cut() -> None:
    async def shout() -> str:
        return "x" * 5000

    tool = Tool(name="shout", description="", function=shout, parameters={}, max_characters=10)
    assert await tool({}) == "xxxxxxxxxx ... (5,000 characters)"


async def test_an_episode_with_tools() -> None:
    tokenizer = make_tokenizer()
    encoder = ChatEncoder(tokenizer)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    engine = ScriptedEngine([encoded(tokenizer, call + END), encoded(tokenizer, "5" + END)])
    world = ToolEnvironment(
        [{"role": "user", "content": "2+3"}], TOOLS, reward=lambda text: float(text == "5")
    )
    episode: Any = await run_episode(engine, world, encoder, request_id="e", sampling=SAMPLING)
    text = tokenizer.decode([*episode.prompt_ids, *episode.token_ids])
    assert text == (
        "<|start|>system add,sleep<|end|>\n<|start|>user 2+3<|end|>\n<|start|>assistant "
        f"{call}<|end|>\n<|start|>tool 5<|end|>\n<|start|>assistant 5<|end|>"
    )
    assert tokenizer.decode(episode.token_ids[episode.mask]) == f"{call}<|end|>5<|end|>"
    assert episode.score == 1.0


async def test_tools_are_called_in_the_form_of_the_template() -> None:
    tokenizer = make_tokenizer(
        "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}{% for c in m.tool_calls or [] %}"
        "[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
    )
    call = '[call add {"a": 2, "b": 3}]'
    engine = ScriptedEngine([encoded(tokenizer, call + END), encoded(tokenizer, "5" + END)])
    world = ToolEnvironment(
        [{"role": "user", "content": "2+3"}], TOOLS, reward=lambda text: float(text == "5")
    )
    episode = await run_episode(
        engine, world, ChatEncoder(tokenizer), request_id="e", sampling=SAMPLING
    )
    assert episode.score == 1.0
    text = tokenizer.decode(episode.token_ids)
    assert text == f"{call}<|end|><|start|>tool 5<|end|><|start|>assistant 5<|end|>"


def hermes_calls(text: str) -> list[ToolCall]:
    return read_calls(text, read_hermes)


CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


async def test_calls_between_special_tokens_are_run() -> None:
    """As in the tokenizers whose marks of a call are special tokens: only the end of a turn is not in its text."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [START, "<tool_call>", "</tool_call>"]})
    engine = ScriptedEngine([encoded(tokenizer, CALL + END), encoded(tokenizer, "5" + END)])
    world = ToolEnvironment(
        [{"role": "user", "content": "2+3"}], TOOLS, reward=lambda text: float(text == "5")
    )
    episode: Any = await run_episode(
        engine, world, ChatEncoder(tokenizer), request_id="e", sampling=SAMPLING
    )
    assert (episode.turns, episode.score, episode.end) == ((CALL, "5"), 1.0, "done")


async def test_a_stop_string_is_a_part_of_its_turn() -> None:
    """Its tokens are learned; the end of the turn, which the policy has not written, is added and is not."""
    tokenizer = make_tokenizer()
    engine = ScriptedEngine([encoded(tokenizer, "<a>x</a>"), encoded(tokenizer, "y" + END)])
    world = Questions(["x", "abc"])
    sampling = SamplingParams(max_tokens=200, stop=("</a>",))
    episode: Any = await run_episode(
        engine, world, ChatEncoder(tokenizer), request_id="e", sampling=sampling
    )
    assert episode.turns == ("<a>x</a>", "y")
    assert tokenizer.decode(episode.token_ids[episode.mask]) == f"<a>x</a>y{END}"
    text = tokenizer.decode(episode.token_ids)
    assert text == f"<a>x</a>{END}\n{START}user abc{END}\n{START}assistant y{END}"
    assert engine.requests[0].sampling.stop == ("</a>",)


@pytest.mark.parametrize(
    "text",
    [
        f"<think>I could {CALL}</think>no",
        f"I could {CALL}</think>no",
        f"<think>first</think> then <think>{CALL}",
        f"<think>{CALL} and {CALL}",
    ],
)
def test_calls_of_a_thought_are_not_run(text: str) -> None:
    """Also where the template has opened the thought, or the turn does not close it."""
    assert hermes_calls(text) == []
    assert [call.name for call in hermes_calls(f"<think>{CALL}</think>{CALL}<think>.</think>")] == [
        "add"
    ]


async def test_calls_of_a_turn_that_was_cut_off_are_not_run() -> None:
    """No turn could read their results; the turn may be a thought that the template has opened."""
    world = ToolEnvironment(
        [{"role": "user", "content": "?"}], [], reward=lambda text: float(len(text))
    )
    assert await world.step(CALL, truncated=True) == Reply(reward=len(CALL), done=True)


@pytest.mark.parametrize("content", ["gcore-turn", "see gcore-turn", "gcore-turn gcore-turn."])
def test_messages_may_have_any_text(content: str) -> None:
    """That by which the encoder finds its place in a rendered conversation is in no message."""
    tokenizer = make_tokenizer()
    tokens = ChatEncoder(tokenizer).next(
        [{"role": "user", "content": content}], last_token=tokenizer.eos_token_id
    )
    assert tokens == encoded(tokenizer, f"\n<|start|>user {content}<|end|>\n<|start|>assistant ")


def test_a_turn_may_end_with_the_next_role() -> None:
    """As in GLM's templates: nothing ends a turn but the token with which the next message starts."""
    tokenizer = make_tokenizer(
        "{% for m in messages %}{{ '<|start|>' if m.role == 'user' else '<|end|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|end|>' }}{% endif %}"
    )
    encoder = ChatEncoder(tokenizer)
    start = tokenizer.convert_tokens_to_ids(START)
    assert encoder.next([{"role": "user", "content": "x"}], last_token=start) == encoded(
        tokenizer, "x<|end|>"
    )
    assert encoder.next([{"role": "user", "content": "x"}], last_token=7) == encoded(
        tokenizer, "<|start|>x<|end|>"
    )


@dataclass
class Closing(Questions):
    """Keeps the reasons of its `close`."""

    reasons: list[str] = field(default_factory=list)

    async def close(self, reason: str) -> None:
        self.reasons.append(reason)


async def test_environments_are_closed_once() -> None:
    """However the episode ends: by itself, by a limit, by a failure, or because the run ends."""

    class Failing(Closing):
        async def step(self, completion: str) -> Reply:
            raise KeyError(completion)

    class Waiting(Closing):
        async def step(self, completion: str) -> Reply:
            await asyncio.sleep(60)
            return await super().step(completion)

    class Unopened(Closing):
        async def reset(self) -> Opening:
            raise OSError("no board")

    async def play(world: Closing, *, max_tokens: int = 200) -> None:
        engine = ScriptedEngine([[7, 8, 1]] * 4)
        sampling = SamplingParams(max_tokens=max_tokens)
        await run_episode(
            engine, world, ChatEncoder(make_tokenizer()), request_id="e", sampling=sampling
        )

    done = Closing(["x"])
    await play(done)
    too_long = Closing(["x"] * 4)
    await play(too_long, max_tokens=4)
    failing = Failing(["x"])
    with pytest.raises(EpisodeError, match="KeyError"):
        await play(failing)
    unopened = Unopened(["x"])
    with pytest.raises(EpisodeError, match="no board"):
        await play(unopened)
    cancelled = Waiting(["x"])
    task = asyncio.create_task(play(cancelled))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    closed = [world.reasons for world in (done, too_long, failing, unopened, cancelled)]
    assert closed == [["done"], ["length"], ["failed"], ["failed"], ["cancelled"]]


async def test_a_close_that_fails_is_a_failure_of_the_episode() -> None:
    class Stuck(Closing):
        async def close(self, reason: str) -> None:
            raise OSError(f"still running after {reason}")

    with pytest.raises(EpisodeError, match="episode 'e': close: OSError: still running after done"):
        await run_episode(
            ScriptedEngine([[7, 1]]),
            Stuck(["x"]),
            ChatEncoder(make_tokenizer()),
            request_id="e",
            sampling=SAMPLING,
        )


REFUSING = "{% for m in messages %}{{ m.content if m.role == 'user' else raise_exception('only users') }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (
            REFUSING,
            [{"role": "system", "content": "?"}],
            "turn 1: the chat template refuses the messages: only users",
        ),
        (TEMPLATE, [{"role": "user"}], "reset: message 1.content is missing; expected text"),
        (
            TEMPLATE,
            [{"role": "user", "content": "\ud800"}],
            "reset: message 1.content has a lone surrogate",
        ),
        (
            TEMPLATE,
            [{"role": "user", "content": "x" * 600}],
            "turn 1: request 'e/0' needs .* at most 512",
        ),
    ],
)
async def test_an_opening_that_cannot_be_answered_ends_its_episode(
    tied: TinyModel, template: str, messages: list[dict[str, Any]], expected: str
) -> None:
    """And not the run: an `EpisodeError` is dropped where that is the reaction to failures."""

    class Opened(Closing):
        async def reset(self) -> Opening:
            return Opening(messages=messages)

    engine = HFEngine.from_pretrained(tied.path, eos_token_ids=EOS_TOKEN_IDS)
    world = Opened(["x"])
    with pytest.raises(EpisodeError, match=f"episode 'e': {expected}"):
        await run_episode(
            engine,
            world,
            ChatEncoder(make_tokenizer(template)),
            request_id="e",
            sampling=SamplingParams(max_tokens=8),
        )
    assert world.reasons == ["failed"]
    await engine.close()


async def test_an_environment_that_cannot_be_made_fails_its_episode() -> None:
    make = partial(run_environment, lambda row: row["board"], 1.0)
    player = EpisodePlayer(
        drive=make,
        encoder=ChatEncoder(make_tokenizer()),
        multi_turn=_LIMITS,
        max_context=0,
        credit=None,
        timeout_s=0.0,
        needs_score=False,
    )
    prompt = Prompt(text="", token_ids=(1,), row={})
    with pytest.raises(EpisodeError, match="the environment was not made: KeyError: 'board'"):
        await player.play(ScriptedEngine([]), prompt, "e", SAMPLING, 0)


def test_text_without_calls_has_none() -> None:
    assert hermes_calls("<tool_call> never closed") == []


def by_length(feedback: str) -> Callable[[str], Awaitable[tuple[float, str]]]:
    async def reward(text: str) -> tuple[float, str]:
        return len(text) / 10, feedback

    return reward


@pytest.mark.parametrize(
    ("max_revisions", "max_tokens", "turns", "score", "end"),
    [(3, 200, 3, 0.5, "done"), (1, 200, 2, 0.3, "done"), (3, 30, 1, 0.4, "length")],
)
async def test_answers_go_back_with_what_was_said_of_them(
    max_revisions: int, max_tokens: int, turns: int, score: float, end: str
) -> None:
    """Until one is good enough, or nothing is left; the last one's score counts, be it worse than another's."""
    tokenizer = make_tokenizer()
    engine = ScriptedEngine([encoded(tokenizer, text + END) for text in ("wxyz", "xyz", "vwxyz")])
    world = RevisionEnvironment(
        [{"role": "user", "content": "?"}],
        by_length("longer!"),
        good_enough=0.5,
        max_revisions=max_revisions,
    )
    episode: Any = await run_episode(
        engine,
        world,
        ChatEncoder(tokenizer),
        request_id="e",
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    assert (len(episode.turns), episode.score, episode.end) == (turns, pytest.approx(score), end)
    assert tokenizer.decode(episode.token_ids).count("<|start|>user longer!") == turns - 1


async def test_without_words_the_score_is_said() -> None:
    world = RevisionEnvironment([], by_length(""), good_enough=1.0, max_revisions=1)
    assert (await world.step("abcd")).messages == [
        {"role": "user", "content": "The answer scores 0.4."}
    ]


def test_bad_revisions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_revisions is 0; expected at least 1"):
        RevisionEnvironment([], by_length(""), good_enough=1.0, max_revisions=0)
    with pytest.raises(ValueError, match="good_enough is nan; expected a finite number"):
        RevisionEnvironment([], by_length(""), good_enough=float("nan"), max_revisions=1)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for x in %}", "Expected an expression"),
        ("{{ nothing.a }}", "'nothing' is undefined"),
        ("{{ raise_exception('no system') }}", "no system"),
        (
            "{{ ''.__class__.__mro__ }}",
            "access to attribute '__class__' of 'str' object is unsafe.",
        ),
        ("{{ 1 / 0 }}", "division by zero"),
        (
            "{{ range(10 ** 9) }}",
            "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth exceeded"),
    ],
)
def test_a_chat_template_that_fails(template: str, reason: str) -> None:
    tokenizer = make_tokenizer(template)
    with pytest.raises(
        MessageError, match=re.escape(f"the chat template refuses the messages: {reason}")
    ):
        render_chat(tokenizer, [{"role": "user", "content": "a"}], tokenize=False)
