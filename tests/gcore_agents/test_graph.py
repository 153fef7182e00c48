"""The graph of a session: two invariants over random conversations, and the rules of its parts."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from random_agents import check_invariants, check_tree, make_agent
from template_cases import TEMPLATES, make_template_tokenizer, make_tokenizer, make_tool

from gcore_agents import (
    CallError,
    ChatCall,
    ChatEncoder,
    MessageGraph,
    SampledTokens,
    Session,
    SessionBudget,
    SessionReward,
    choose_trained,
    collect_tokens,
)
from gcore_agents.calls import ChatReply
from gcore_agents.graph import MessageNode, has_equal_reasoning, message_key

NUM_CONVERSATIONS = 10_000


async def check_conversations(name: str, count: int) -> None:
    """Every second one is without changes, so that it is one path."""
    for seed in range(count):
        is_changed = seed % 2 == 1
        history = ("sampled", "template", "tool_cycle")[seed % 3] if is_changed else "sampled"
        agent = make_agent(name, seed, history=history, change_share=0.25 * is_changed)
        await agent.work()
        assert not agent.refusals
        check_invariants(agent)
        trained = choose_trained(agent.session)
        tree = collect_tokens(agent.session.graph, trained=trained)
        if tree is not None:
            assert tree.routed_experts is not None
            check_tree(tree, [*trained])
        if not is_changed:
            graph = agent.session.graph
            assert not +graph.findings
            assert all(len(node.children) <= 1 for node in (graph.root, *graph.nodes))
            assert len(trained) == len(agent.policy.turns)


@pytest.mark.parametrize("name", TEMPLATES)
async def test_paths_are_what_the_policy_got_and_gave(name: str) -> None:
    await check_conversations(name, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
async def test_paths_are_what_the_policy_got_and_gave_in_many_conversations(name: str) -> None:
    await check_conversations(name, NUM_CONVERSATIONS // len(TEMPLATES) + 1)


def make_text(role: str, text: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **fields}


def make_call(arguments: object, name: str = "add", **fields: Any) -> dict[str, Any]:
    call = {"id": "a", "function": {"name": name, "arguments": arguments}}
    return make_text("assistant", "", tool_calls=[call], **fields)


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        (make_text("user", "a"), make_text("user", " a\n"), True),
        (make_text("user", "a"), make_text("user", "a", name="me"), True),
        (
            make_text("user", "ab"),
            {"role": "user", "content": [{"text": "a"}, {"text": "b"}]},
            True,
        ),
        (make_text("user", "a"), make_text("user", "b"), False),
        (make_text("user", "a"), make_text("system", "a"), False),
        (make_text("assistant", ""), {"role": "assistant", "content": None}, True),
        (make_text("assistant", ""), {"role": "assistant"}, True),
        (make_call({"a": 1, "b": 2}), make_call('{"b": 2,\n"a": 1}'), True),
        (make_call({"a": 1.0}), make_call('{"a": 1}'), True),
        (make_call({"a": True}), make_call({"a": 1}), False),
        (make_call({}), make_call(""), True),
        (make_call({"a": 1}), make_call({"a": 2}), False),
        (make_call({}), make_call({}, name="sub"), False),
        (make_call({}), make_call("{"), False),
        (make_call({}), make_call({}, reasoning_content="Hm."), True),
        (make_call({}), make_text("assistant", ""), False),
    ],
)
def test_keys_of_messages(first: dict[str, Any], second: dict[str, Any], is_equal: bool) -> None:
    assert (message_key(first) == message_key(second)) == is_equal


def test_reasoning_may_be_left_out_but_not_changed() -> None:
    stored = make_text("assistant", "a", reasoning_content="Hm.")
    assert has_equal_reasoning(make_text("assistant", "a"), stored)
    assert has_equal_reasoning(make_text("assistant", "a", reasoning_content=" Hm.\n"), stored)
    assert not has_equal_reasoning(make_text("assistant", "a", reasoning_content="No."), stored)


def add_turn(graph: MessageGraph, parent: MessageNode, text: str, tokens: list[int]) -> MessageNode:
    turn = graph.add_turn(
        parent,
        make_text("assistant", text),
        token_ids=tokens,
        log_probs=[-0.5] * len(tokens),
        weight_versions=[7] * len(tokens),
        finish_reason="stop",
        response_id=f"r{len(graph.nodes)}",
    )
    turn.is_delivered = True
    return turn


def test_equal_messages_between_turns_are_one_node() -> None:
    graph = MessageGraph()
    question = [make_text("user", "a")]
    node = graph.add_context(graph.root, question, [1, 2])
    assert graph.add_context(graph.root, [make_text("user", " a")], [1, 2]) is node
    assert graph.add_context(graph.root, question, [1, 3]) is not node


def test_the_latest_of_equal_turns_that_was_delivered_is_found() -> None:
    graph = MessageGraph()
    question = [make_text("user", "a")]
    node = graph.add_context(graph.root, question, [1])
    first = add_turn(graph, node, "b", [2])
    second = add_turn(graph, node, "b", [3])
    messages = [*question, make_text("assistant", "b"), make_text("user", "c")]
    assert graph.find(messages) == (second, 2)
    second.is_delivered = False
    assert graph.find(messages) == (first, 2)


def test_of_equal_turns_the_one_that_was_continued_alike_is_found() -> None:
    """Two helpers begin alike, and one of them has gone on before the other began."""
    graph = MessageGraph()
    question = [make_text("user", "a")]
    node = graph.add_context(graph.root, question, [1])
    first = add_turn(graph, node, "b", [2])
    result = [make_text("user", "c")]
    second = add_turn(graph, graph.add_context(first, result, [3]), "d", [4])
    add_turn(graph, node, "b", [2])
    messages = [*question, make_text("assistant", "b"), *result, make_text("assistant", "d")]
    assert graph.find([*messages, make_text("user", "e")]) == (second, 4)


def test_tokens_are_found_without_messages() -> None:
    graph = MessageGraph()
    node = graph.add_context(graph.root, [], [1, 2])
    turn = add_turn(graph, node, "b", [3])
    assert graph.find_tokens([1, 2, 3, 4]) is turn
    assert graph.find_tokens([1, 2]) is node
    assert graph.find_tokens([1, 5]) is graph.root
    assert graph.find([make_text("assistant", "b")]) == (graph.root, 0)


class Script:
    """A policy that says these texts in turn, and the last one again and again."""

    def __init__(self, encoder: ChatEncoder, *texts: str, delay_s: float = 0.0) -> None:
        self.encoder = encoder
        self.texts = list(texts)
        self.delay_s = delay_s
        self.prompts: list[str] = []
        self.max_tokens: list[int] = []
        self.seeds: list[int] = []
        self.num_at_once = self.most_at_once = 0
        self.fails = False

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        seed: int,
        max_tokens: int,
        **options: Any,
    ) -> SampledTokens:
        del options
        self.prompts.append(self.encoder.turn_text(prompt_ids, is_ended=False))
        self.max_tokens.append(max_tokens)
        self.seeds.append(seed)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await asyncio.sleep(self.delay_s)
        self.num_at_once -= 1
        if self.fails:
            raise RuntimeError("the engine is gone")
        all_tokens = self.encoder.encode(text)
        tokens = all_tokens[:max_tokens]
        is_ended = tokens == all_tokens and text.endswith("<|im_end|>")
        return SampledTokens(
            token_ids=tokens,
            log_probs=[-0.5] * len(tokens),
            weight_versions=[3] * len(tokens),
            finish_reason="stop" if is_ended else "length",
        )


def make_session(*texts: str, delay_s: float = 0.0, **options: Any) -> tuple[Session, Script]:
    encoder = ChatEncoder(make_tokenizer("qwen3"))
    script = Script(encoder, *texts, delay_s=delay_s)
    options = {"budget": SessionBudget(max_tokens=10_000), **options}
    return Session(session_id="s", sampler=script, encoder=encoder, **options), script


async def ask(session: Session, *messages: Mapping[str, Any], **options: Any) -> ChatReply:
    [reply] = await session.respond(ChatCall(messages=messages, **options))
    session.mark_delivered([reply])
    return reply


USER = make_text("user", "first")
MORE = make_text("user", "more")
THOUGHT = "<think>\nHm.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("history", ["sampled", "template", "tool_cycle"])
async def test_history_says_what_becomes_of_reasoning(history: Any) -> None:
    """Qwen3's template keeps reasoning until the next message of the user."""
    texts = [f"{THOUGHT}{CALL}<|im_end|>", f"{THOUGHT}Yes.<|im_end|>", "<|im_end|>"]
    session, script = make_session(*texts, history=history)
    call = await ask(session, USER)
    call_id = call.message["tool_calls"][0]["id"]
    result = make_text("tool", "5", tool_call_id=call_id)
    answer = await ask(session, USER, call.message, result)
    await ask(session, USER, call.message, result, answer.message, MORE)
    assert script.prompts[1].count("Hm.") == 1
    kept = 2 if history == "sampled" else 0
    assert script.prompts[2].count("Hm.") == kept
    [first] = session.graph.root.children
    assert len(first.children) == (1 if kept else 2)
    assert session.graph.findings["history_rendered"] == (0 if kept else 1)
    if history != "template":
        assert script.prompts[1].startswith(f"{script.prompts[0]}{THOUGHT}{CALL}<|im_end|>")


async def test_reasoning_that_is_sent_is_rendered_where_the_template_renders_it() -> None:
    """An agent's message that the policy did not write; gpt-oss's template has another name for it."""
    for name in ("qwen3", "gptoss", "muse_glimmer", "gemma4_v5", "lfm2_2_5", "qwen3_8"):
        encoder = ChatEncoder(make_tokenizer(name))
        call = make_call({"a": 1}, reasoning_content="gcorethought")
        result = make_text("tool", "5", tool_call_id="a")
        text = encoder.turn_text(encoder.first([USER, call, result]), is_ended=False)
        assert "gcorethought" in text


async def test_results_have_the_name_of_the_call() -> None:
    """gpt-oss and Gemma write it, and results in OpenAI's API do not have it."""
    encoder = ChatEncoder(make_tokenizer("gptoss"))
    text = ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    tokens = encoder.encode(text)
    turn = encoder.read_turn(tokens, is_ended=True)
    result = make_text("tool", "5", tool_call_id=turn["tool_calls"][0]["id"])
    added = encoder.next([result], last_token=tokens[-1], turn=turn)
    assert encoder.turn_text(added, is_ended=False).startswith("<|start|>functions.multiply to=")


async def test_an_agent_that_changes_a_turn_begins_a_branch() -> None:
    session, script = make_session("One.<|im_end|>")
    await ask(session, USER)
    await ask(session, USER, make_text("assistant", "Two."), MORE)
    assert "Two." in script.prompts[1]
    assert session.graph.findings == {"fork_text": 1}
    assert [len(node.path()) for node in session.graph.turns()] == [2, 3]
    assert len(choose_trained(session)) == 2


@pytest.mark.parametrize(
    ("messages", "finding"),
    [
        ([make_text("system", "b"), USER], "fork_system"),
        ([make_text("system", "a"), MORE], "fork_context"),
        ([make_text("system", "a"), USER, make_call({}), MORE], "fork_calls"),
        (
            [
                make_text("system", "a"),
                USER,
                make_text("assistant", "One.", reasoning_content="b"),
                MORE,
            ],
            "fork_reasoning",
        ),
    ],
)
async def test_findings_name_what_differs(messages: list[dict[str, Any]], finding: str) -> None:
    session, _ = make_session(f"{THOUGHT}One.<|im_end|>")
    await ask(session, make_text("system", "a"), USER)
    await ask(session, *messages)
    assert +session.graph.findings == {finding: 1}


async def test_other_tools_are_another_conversation_if_the_template_announces_them() -> None:
    session, script = make_session("One.<|im_end|>")
    await ask(session, USER, tools=[make_tool("add")])
    reply = await ask(session, USER, tools=[make_tool("sub")])
    assert '"sub"' in script.prompts[1]
    assert session.graph.findings == {"fork_tools": 1}
    await ask(session, USER, reply.message, MORE, tools=[make_tool("sub")])
    assert script.prompts[2].startswith(script.prompts[1])
    assert session.graph.findings == {"fork_tools": 1}
    encoder = ChatEncoder(make_tokenizer("phi3"))
    silent = Session(
        session_id="s",
        sampler=Script(encoder, "One."),
        encoder=encoder,
        budget=SessionBudget(max_tokens=10_000),
    )
    reply = await ask(silent, USER, tools=[make_tool("add")])
    await ask(silent, USER, reply.message, MORE, tools=[make_tool("sub")])
    assert len(silent.graph.root.children) == 1


async def test_a_repeated_call_gets_the_same_reply_until_it_is_delivered() -> None:
    session, _ = make_session("One.<|im_end|>", "Two.<|im_end|>", delay_s=0.01)
    call = ChatCall(messages=[USER])
    first = await session.respond(call)
    # The client did not get it, or says that it repeats a call.
    assert await session.respond(call) == first
    session.mark_delivered(first)
    assert await session.respond(ChatCall(messages=[USER], is_retry=True)) == first
    third = await session.respond(call)
    assert third[0].message["content"] == "Two."
    assert len(session.graph.nodes) == 3


async def test_calls_with_one_key_get_one_reply() -> None:
    session, script = make_session("One.<|im_end|>")
    replies = await session.respond(ChatCall(messages=[USER], retry_key="k"))
    session.mark_delivered(replies)
    assert await session.respond(ChatCall(messages=[USER], retry_key="k")) == replies
    assert await session.respond(ChatCall(messages=[USER], retry_key="l")) != replies
    assert len(script.prompts) == 2


async def test_a_call_that_failed_is_answered_when_it_is_repeated() -> None:
    session, script = make_session("One.<|im_end|>")
    script.fails = True
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await session.respond(ChatCall(messages=[USER]))
    script.fails = False
    assert (await ask(session, USER)).message["content"] == "One."
    assert [node.is_turn for node in session.graph.nodes] == [False, True]


async def test_a_client_that_goes_away_does_not_end_the_turn() -> None:
    session, script = make_session("One.<|im_end|>", delay_s=0.05)
    task = asyncio.create_task(session.respond(ChatCall(messages=[USER])))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    reply = await ask(session, USER)
    assert reply.message["content"] == "One."
    assert len(script.prompts) == 1


async def test_turns_that_are_sampled_again_count_if_they_are_the_last_or_continued() -> None:
    session, _ = make_session("One.<|im_end|>", "Two.<|im_end|>", "Three.<|im_end|>")
    replies = [await ask(session, USER) for _ in range(3)]
    texts = [node.messages[0]["content"] for node in choose_trained(session)]
    assert texts == ["Three."]
    await ask(session, USER, replies[0].message, MORE)
    trained = sorted(node.number for node in choose_trained(session))
    assert trained == [1, 3, 5]
    session.add_reward(SessionReward(value=1.0, response_id=replies[1].response_id))
    assert len(choose_trained(session)) == 4


async def test_several_turns_of_one_call_all_count() -> None:
    session, script = make_session("One.<|im_end|>", "Two.<|im_end|>")
    replies = await session.respond(ChatCall(messages=[USER], n=2))
    session.mark_delivered(replies)
    assert len(choose_trained(session)) == 2
    assert len(set(script.seeds)) == 2


async def test_turns_of_a_call_end_with_the_first_that_fails() -> None:
    class Script:
        num_turns = 0

        async def sample(self, prompt_ids: Sequence[int], **options: Any) -> SampledTokens:
            del prompt_ids, options
            self.num_turns += 1
            if self.num_turns == 3:
                raise RuntimeError("the engine is gone")
            await asyncio.sleep(60)
            raise AssertionError

    budget = SessionBudget(max_tokens=1_000, max_tokens_per_turn=20)
    session, _ = make_session("One.<|im_end|>", budget=budget)
    session.sampler = Script()
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await session.respond(ChatCall(messages=[USER], n=3))
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_turns_that_the_agent_did_not_get_are_not_trained_on() -> None:
    session, _ = make_session("One.<|im_end|>")
    await session.respond(ChatCall(messages=[USER]))
    assert choose_trained(session) == set()
    assert collect_tokens(session.graph, trained=set()) is None


async def test_a_turn_that_is_continued_was_delivered() -> None:
    """Its last byte was read, although its connection ended with an error."""
    session, _ = make_session("One.<|im_end|>", "Two.<|im_end|>")
    [first] = await session.respond(ChatCall(messages=[USER]))
    second = await ask(session, USER, first.message, MORE)
    names = {turn.response_id for turn in choose_trained(session)}
    assert names == {first.response_id, second.response_id}


async def test_calls_at_once_share_what_is_left_of_the_tokens() -> None:
    """Each is given all that is left, so that one waits for the other."""
    budget = SessionBudget(max_tokens=40)
    session, script = make_session("A text.<|im_end|>", delay_s=0.01, budget=budget)
    calls = [ChatCall(messages=[USER]) for _ in range(2)]
    calls[1] = ChatCall(messages=[USER], max_tokens=30)
    await asyncio.gather(*map(session.respond, calls))
    assert script.most_at_once == 1
    assert script.max_tokens == [40, 30]
    assert session.num_used_tokens == 16


async def test_calls_at_once_with_limits_are_sampled_at_once() -> None:
    budget = SessionBudget(max_tokens=100, max_tokens_per_turn=20)
    session, script = make_session("A text.<|im_end|>", delay_s=0.01, budget=budget)
    messages = [make_text("user", f"question {number}") for number in range(3)]
    await asyncio.gather(*(session.respond(ChatCall(messages=[m])) for m in messages))
    assert script.most_at_once >= 2
    assert len(session.graph.root.children) == len(list(session.graph.turns()))


async def test_calls_at_once_differ_in_their_seeds() -> None:
    budget = SessionBudget(max_tokens=100, max_tokens_per_turn=20)
    session, script = make_session("A text.<|im_end|>", delay_s=0.01, budget=budget)
    calls = [ChatCall(messages=[USER], retry_key=key) for key in "abc"]
    await asyncio.gather(*map(session.respond, calls))
    assert len(set(script.seeds)) == 3


async def test_messages_wait_for_the_tokens_of_turns_that_are_being_sampled() -> None:
    """They would be too many together with the first turn, if that had all of its tokens."""
    budget = SessionBudget(max_tokens=100)
    session, script = make_session("x" * 200, "Two.<|im_end|>", delay_s=0.02, budget=budget)
    first = asyncio.create_task(ask(session, USER))
    await asyncio.sleep(0.01)
    reply = await ask(session, make_text("user", "y" * 50))
    assert not reply.token_ids
    assert (await first).finish_reason == "length"
    assert len(script.prompts) == 1
    assert session.num_used_tokens == 100


@pytest.mark.parametrize(
    ("budget", "end"),
    [
        (SessionBudget(max_tokens=1_000, max_calls=2), "max_turns"),
        (SessionBudget(max_tokens=60), "length"),
        (SessionBudget(max_tokens=1_000, max_context=80), "length"),
        (SessionBudget(max_tokens=1_000, timeout_s=0.03), "timeout"),
    ],
)
async def test_a_session_whose_budget_is_used_up_is_ended_by_a_text(
    budget: SessionBudget, end: str
) -> None:
    """It is not recorded, and any number of calls get it."""
    session, script = make_session("One.<|im_end|>", budget=budget, delay_s=0.02)
    messages = [USER]
    reply = None
    for _ in range(6):
        reply = await ask(session, *messages)
        messages += [dict(reply.message), MORE]
    assert reply is not None
    assert "budget" in reply.message["content"]
    assert reply.finish_reason == "stop"
    assert session.end == end
    assert 1 <= len(script.prompts) < 5
    assert len(list(session.graph.turns())) == len(script.prompts)
    assert session.num_used_tokens <= budget.max_tokens


async def test_a_turn_that_is_cut_off_has_its_length() -> None:
    session, _ = make_session("A long text.<|im_end|>", budget=SessionBudget(max_tokens=100))
    reply = await ask(session, USER, max_tokens=6)
    assert (reply.message["content"], reply.finish_reason) == ("A long", "length")


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([USER, make_text("assistant", "One.")], "messages end with one of the assistant"),
        ([{"role": "user"}], "content is missing"),
        ([USER, {"role": "tool", "content": 5}], "is 5"),
    ],
)
async def test_calls_that_cannot_be_answered(messages: list[dict[str, Any]], match: str) -> None:
    session, _ = make_session("One.<|im_end|>")
    await ask(session, USER)
    with pytest.raises(CallError, match=match):
        await ask(session, *messages)
    assert (await ask(session, USER, make_text("assistant", "One."), MORE)).message


async def test_a_template_that_refuses_a_message_refuses_its_call() -> None:
    """It was a traceback in the middle of a run."""
    encoder = ChatEncoder(make_tokenizer("gemma3"))
    script = Script(encoder, "One.")
    budget = SessionBudget(max_tokens=1_000)
    session = Session(session_id="s", sampler=script, encoder=encoder, budget=budget)
    reply = await ask(session, USER)
    with pytest.raises(CallError, match="the chat template refuses the messages"):
        await ask(session, USER, reply.message, make_text("tool", "5", tool_call_id="a"))


async def test_a_turn_without_tokens_is_continued() -> None:
    session, _ = make_session("", "One.<|im_end|>")
    reply = await ask(session, USER)
    assert reply.message["content"] == ""
    assert (await ask(session, USER, reply.message, MORE)).message["content"] == "One."


async def test_closed_sessions_answer_nothing() -> None:
    session, _ = make_session("One.<|im_end|>", delay_s=10.0)
    task = asyncio.create_task(session.respond(ChatCall(messages=[USER])))
    await asyncio.sleep(0.01)
    session.close()
    for call in (task, session.respond(ChatCall(messages=[MORE]))):
        with pytest.raises(CallError, match="the session is closed") as error:
            await call
        assert error.value.status == 409


def make_tree() -> tuple[MessageGraph, dict[str, MessageNode]]:
    """Return a conversation that branches after its first turn, and one that shares nothing with it."""
    graph = MessageGraph()
    question = graph.add_context(graph.root, [USER], [1, 2])
    first = add_turn(graph, question, "a", [3, 4])
    other = add_turn(graph, question, "b", [5])
    more = graph.add_context(first, [MORE], [6])
    again = add_turn(graph, more, "c", [7, 8])
    apart = graph.add_context(graph.root, [make_text("user", "apart")], [9])
    last = add_turn(graph, apart, "d", [10])
    names = {"first": first, "other": other, "again": again, "last": last}
    return graph, names


def test_the_tree_of_all_turns() -> None:
    graph, nodes = make_tree()
    tree = collect_tokens(graph, trained=set(nodes.values()))
    assert tree is not None
    assert tree.prompt_ids.tolist() == [1, 2]
    assert tree.token_ids.tolist() == [3, 4, 6, 7, 8, 5, 9, 10]
    assert tree.mask.tolist() == [True, True, False, True, True, True, False, True]
    assert tree.forks.tolist() == [[5, -1], [6, -2]]
    assert tree.weight_versions.tolist() == [7, 7, -1, 7, 7, 7, -1, 7]
    assert tree.log_probs.tolist() == [-0.5, -0.5, 0, -0.5, -0.5, -0.5, 0, -0.5]
    assert list(tree.turns) == [nodes["first"], nodes["again"], nodes["other"], nodes["last"]]
    assert list(tree.turn_starts) == [0, 3, 5, 7]
    check_tree(tree, list(nodes.values()))


def test_turns_that_are_not_trained_on_are_context_of_others_or_left_out() -> None:
    graph, nodes = make_tree()
    tree = collect_tokens(graph, trained={nodes["again"]})
    assert tree is not None
    assert tree.token_ids.tolist() == [3, 4, 6, 7, 8]
    assert tree.mask.tolist() == [False, False, False, True, True]
    assert tree.forks.shape == (0, 2)
    apart = collect_tokens(graph, trained={nodes["last"]})
    assert apart is not None
    assert apart.prompt_ids.tolist() == [9]
    assert apart.token_ids.tolist() == [10]


def test_turns_without_tokens_are_in_no_row() -> None:
    graph = MessageGraph()
    question = graph.add_context(graph.root, [USER], [1])
    empty = add_turn(graph, question, "", [])
    assert collect_tokens(graph, trained={empty}) is None
    more = graph.add_context(empty, [MORE], [2])
    turn = add_turn(graph, more, "a", [3])
    tree = collect_tokens(graph, trained={empty, turn})
    assert tree is not None
    assert tree.token_ids.tolist() == [2, 3]
    assert tree.forks.tolist() == []


async def test_rewards_are_numbers_of_turns_that_exist() -> None:
    session, _ = make_session("One.<|im_end|>")
    assert session.score is None
    with pytest.raises(CallError, match="expected a finite number"):
        session.add_reward(SessionReward(value=float("nan")))
    with pytest.raises(CallError, match="response_id is 'r'"):
        session.add_reward(SessionReward(value=1.0, response_id="r"))
    reply = await ask(session, USER)
    session.add_reward(SessionReward(value=1.0, response_id=reply.response_id))
    session.add_reward(SessionReward(value=0.5))
    assert session.score == 1.5


async def test_prompts_of_tokens_are_continued() -> None:
    """Messages of the same session do not follow them."""
    session, script = make_session("One.<|im_end|>")
    prompt = tuple(session.encoder.encode("anything"))
    [reply] = await session.respond(ChatCall(messages=[], prompt_ids=prompt))
    session.mark_delivered([reply])
    longer = (*prompt, *reply.token_ids, *session.encoder.encode("else"))
    await session.respond(ChatCall(messages=[], prompt_ids=longer))
    assert script.prompts == ["anything", "anythingOne.<|im_end|>else"]
    await ask(session, USER)
    assert script.prompts[2].startswith("<|im_start|>user\nfirst")
    assert len(session.graph.root.children) == 2


async def test_a_template_that_renders_no_tools_needs_no_branch_for_them() -> None:
    tokenizer = make_template_tokenizer(
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    )
    encoder = ChatEncoder(tokenizer)
    script = Script(encoder, "One.")
    budget = SessionBudget(max_tokens=1_000)
    session = Session(session_id="s", sampler=script, encoder=encoder, budget=budget)
    reply = await ask(session, USER)
    await ask(session, USER, reply.message, MORE, tools=[make_tool("add")])
    assert len(session.graph.root.children) == 1
    assert json.dumps(session.graph.findings) == "{}"
