"""Random conversations of agents that send back what they got as many clients do: not byte for byte."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from template_cases import WITHOUT_TOOLS, make_tokenizer, make_tool, write_turn

from gcore_agents import CallError, ChatCall, ChatEncoder, SampledTokens, Session, SessionBudget
from gcore_agents.graph import MessageNode
from gcore_agents.rows import SessionTokens

TOOL = make_tool("add")
WORDS = ("yes", "no", "Well, so:", "1 + 1 = 2", "  spaced  ", "{braces}", "<b>", "two\n\nlines")


@dataclass(frozen=True)
class SampledTurn:
    token_ids: list[int]
    is_ended: bool


def make_turn_pool(encoder: ChatEncoder, chance: random.Random) -> list[SampledTurn]:
    """Return turns as the template writes them, with reasoning, text and calls; some cut off, some of any tokens."""
    pool: list[SampledTurn] = []
    full_prompt = encoder.encode(encoder.render([{"role": "user", "content": "first"}]))
    for number in range(24):
        turn: dict[str, Any] = {"role": "assistant", "content": chance.choice(WORDS)}
        if chance.random() < 0.5:
            turn["reasoning_content"] = chance.choice(WORDS)
        calls: list[dict[str, Any]] = []
        for _ in range(chance.choice((0, 0, 1, 1, 2))):
            arguments = {
                "number": number,
                "text": chance.choice(WORDS),
                "list": [1.0, {"b": 1, "a": None}],
            }
            call = {"name": "add", "arguments": arguments}
            calls.append({"type": "function", "id": f"abcdefgh{len(calls)}", "function": call})
        if calls:
            turn["tool_calls"] = calls
            turn["content"] = chance.choice(("", turn["content"]))
        written = write_turn(encoder, turn)
        if written is None:
            continue
        prompt, tokens = written
        if encoder.opened_thought and len(prompt) < len(full_prompt):
            tokens = encoder.encode("Hm.</think>") + tokens
        pool.append(SampledTurn(tokens, True))
        if number % 6 == 0:
            pool.append(SampledTurn(tokens[: len(tokens) // 2 + 1], False))
    for _ in range(4):
        tokens = [chance.randrange(encoder.vocab_size) for _ in range(chance.randint(1, 20))]
        pool.append(SampledTurn(tokens, chance.random() < 0.5))
    return pool


def choose_experts(token_ids: Sequence[int]) -> NDArray[np.int16]:
    """Return [N, 1, 1] experts that depend on each token and all before it, as those of a model do."""
    digest = 0
    experts: list[int] = []
    for token in token_ids:
        digest = crc32(token.to_bytes(8, "little"), digest)
        experts.append(digest % 1000)
    return np.array(experts, np.int16)[:, None, None]


@dataclass
class RandomPolicy:
    """Samples turns of a pool, and keeps what it was given and gave."""

    pool: Sequence[SampledTurn]
    chance: random.Random
    prompts: list[list[int]] = field(default_factory=list[list[int]])
    turns: list[SampledTurn] = field(default_factory=list[SampledTurn])

    async def sample(self, prompt_ids: Sequence[int], **options: Any) -> SampledTokens:
        del options
        turn = self.chance.choice(self.pool)
        self.prompts.append(list(prompt_ids))
        self.turns.append(turn)
        count = len(turn.token_ids)
        inputs = [*prompt_ids, *turn.token_ids][:-1]
        return SampledTokens(
            routed_experts=choose_experts(inputs),
            token_ids=list(turn.token_ids),
            log_probs=[-0.5] * count,
            weight_versions=[len(self.turns)] * count,
            finish_reason="stop" if turn.is_ended else "length",
        )


def serialize(message: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Return a message as a client may send it back."""
    sent = dict(message)
    if chance.random() < 0.5:
        sent.pop("reasoning_content", None)
    calls: list[dict[str, Any]] = []
    for call in sent.get("tool_calls", ()):
        arguments = dict(reversed(call["function"]["arguments"].items()))
        form: Any = arguments
        if chance.random() < 0.5:
            # JavaScript writes 1.0 as 1.
            form = json.dumps(arguments, indent=chance.choice((None, 2))).replace("1.0", "1")
        calls.append({**call, "function": {**call["function"], "arguments": form}})
    if calls:
        sent["tool_calls"] = calls
    form = chance.choice(("same", "parts", "spaced", "null"))
    if form == "parts":
        sent["content"] = [{"type": "text", "text": sent["content"]}]
    elif form == "spaced":
        sent["content"] = f"\n{sent['content']} "
    elif form == "null" and calls and not sent["content"]:
        sent["content"] = None
    return sent


@dataclass
class RandomAgent:
    """Works on one task: calls, sends back what it got, and sometimes changes it."""

    name: str
    encoder: ChatEncoder
    pool: Sequence[SampledTurn]
    chance: random.Random
    history: Any = "sampled"
    change_share: float = 0.0

    def __post_init__(self) -> None:
        self.policy = RandomPolicy(self.pool, self.chance)
        self.session = Session(
            session_id="a",
            sampler=self.policy,
            encoder=self.encoder,
            budget=SessionBudget(max_tokens=10**9),
            history=self.history,
        )
        self.messages: list[dict[str, Any]] = []
        self.refusals: list[CallError] = []

    async def work(self) -> None:
        tools = () if self.name in WITHOUT_TOOLS else (TOOL,)
        if self.name != "gemma" and self.chance.random() < 0.5:
            self.messages.append({"role": "system", "content": self.chance.choice(WORDS)})
        self.messages.append(self._make_user())
        for _ in range(self.chance.randint(2, 4)):
            call = ChatCall(messages=list(self.messages), tools=tools)
            try:
                replies = await self.session.respond(call)
                if self._is_changed():
                    # Sampled again if the first was delivered, otherwise the same.
                    if self.chance.random() < 0.5:
                        self.session.mark_delivered(replies)
                    replies = await self.session.respond(call)
            except CallError as error:
                self.refusals.append(error)
                return
            if not self._is_changed():
                self.session.mark_delivered(replies)
            self.messages.append(serialize(replies[0].message, self.chance))
            self._change()
            self.messages.extend(self._answer())

    def _is_changed(self) -> bool:
        return self.chance.random() < self.change_share

    def _change(self) -> None:
        """Change a message that was sent before, or leave some out, as agents do that shorten their history."""
        if not self._is_changed():
            return
        number = self.chance.randrange(len(self.messages))
        if self.chance.random() < 0.3 and self.messages[number]["role"] == "user":
            del self.messages[number + 1 :]
        elif not self.messages[number].get("tool_calls"):
            self.messages[number] = {**self.messages[number], "content": "changed"}

    def _answer(self) -> list[dict[str, Any]]:
        last = self.messages[-1]
        if last["role"] == "user":
            return []
        calls = last.get("tool_calls") or ()
        if not calls or self.name in WITHOUT_TOOLS:
            return [self._make_user()]
        results: list[dict[str, Any]] = []
        for call in calls:
            content = self.chance.choice(WORDS)
            results.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return results

    def _make_user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.chance.choice(WORDS)}


def check_invariants(agent: RandomAgent) -> None:
    """Check that the graph's paths are what the policy was given, and that its turns are as it gave them."""
    turns = list(agent.session.graph.turns())
    assert len(turns) == len(agent.policy.turns)
    for node, prompt, turn in zip(turns, agent.policy.prompts, agent.policy.turns, strict=True):
        assert node.parent is not None
        assert node.parent.path_tokens() == prompt
        assert list(node.token_ids) == turn.token_ids
        assert node.path_tokens() == prompt + turn.token_ids
        assert len(node.log_probs) == len(node.weight_versions) == len(turn.token_ids)
    versions = [version for node in turns for version in node.weight_versions]
    assert len(versions) == sum(len(turn.token_ids) for turn in agent.policy.turns)


def check_tree(tree: SessionTokens, nodes: Sequence[MessageNode]) -> None:
    """Check that each turn follows in the tree what it follows in the graph, and that experts are of its path."""
    parents = list(range(-1, len(tree.token_ids) - 1))
    for token, parent in tree.forks.tolist():
        parents[token] = parent
    prompt = tree.prompt_ids.tolist()
    for node, start in zip(tree.turns, tree.turn_starts, strict=True):
        if not node.token_ids:
            continue
        context: list[int] = []
        place = parents[start]
        while place >= 0:
            context.append(place)
            place = parents[place]
        context.reverse()
        before = prompt if place == -1 else []
        assert [*before, *tree.token_ids[context], *node.token_ids] == node.path_tokens()
        assert tree.mask[start : start + len(node.token_ids)].all()
        if tree.routed_experts is None:
            continue
        places = [*context, *range(start, start + len(node.token_ids))]
        index = [*range(len(before)), *(len(prompt) + place for place in places)][:-1]
        expected = choose_experts(node.path_tokens()[:-1])
        np.testing.assert_array_equal(tree.routed_experts[index], expected)
    assert tree.mask.sum() == sum(len(node.token_ids) for node in nodes)


_ENCODERS: dict[str, tuple[ChatEncoder, list[SampledTurn]]] = {}


def make_agent(name: str, seed: int, **options: Any) -> RandomAgent:
    if name not in _ENCODERS:
        encoder = ChatEncoder(make_tokenizer(name))
        _ENCODERS[name] = encoder, make_turn_pool(encoder, random.Random(name))
    encoder, pool = _ENCODERS[name]
    return RandomAgent(name, encoder, pool, random.Random(seed), **options)
