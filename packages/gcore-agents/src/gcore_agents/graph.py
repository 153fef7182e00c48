"""The conversations of a session as one graph: turns of the policy, and the messages between them, as tokens.

Two rules hold. The tokens on the path to a node are exactly what the engine was given and gave. A token that the policy
sampled is in one node, and never changes. Whatever an agent sends back differently from what it got starts a branch:
nothing is changed, masked or left out for it.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_agents.chat.images import list_images

Message = Mapping[str, Any]
"""``role`` and ``content``, and other fields that the model's chat template knows."""

Finding = Literal[
    "fork_text",
    "fork_calls",
    "fork_reasoning",
    "fork_system",
    "fork_tools",
    "fork_context",
    "history_rendered",
]
"""The cause of a branch: the agent changed the text, the calls or the reasoning of a turn, a system message, the tools,
or another message before a turn; or the chat template renders earlier turns differently now, and ``history`` says to
follow it."""


MessageKey: TypeAlias = tuple[str, Any, str]
"""Role, text, and the JSON of calls."""


def message_key(message: Message) -> MessageKey:
    """Return a key that is equal for equal messages, whichever way a client writes them.

    Text that is missing, None or empty is equal, and so are texts up to space at their ends, and a text and the list of
    its parts. Images are equal if their files are. Calls are compared by name and parsed arguments. Names and ids of
    calls and results are left out, and so is reasoning, which many clients do not send back; see `has_equal_reasoning`.
    """
    calls: list[Any] = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        calls.append([function["name"], _parse_arguments(function.get("arguments"))])
    written_calls = json.dumps(calls, sort_keys=True) if calls else ""
    return message["role"], _text(message.get("content")), written_calls


def has_equal_reasoning(sent: Message, stored: Message) -> bool:
    """Return whether a message that was sent back has the stored one's reasoning, or none."""
    reasoning = str(sent.get("reasoning_content") or "").strip()
    return not reasoning or reasoning == str(stored.get("reasoning_content") or "").strip()


def _text(content: Any) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, list | tuple):
        return content
    texts = [""]
    parts: list[str | bytes] = []
    for part in content:
        if "image" in part:
            # The file itself: a session has one copy of each, so that comparing them is immediate.
            parts += [texts[-1].strip(), part["image"]]
            texts.append("")
        elif part.get("type", "text") != "text":
            return content
        else:
            texts[-1] += part["text"]
    last = texts[-1].strip()
    return (*parts, last) if parts else last


def _parse_arguments(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return _unify_numbers(arguments or {})
    try:
        return _unify_numbers(json.loads(arguments or "{}"))
    except ValueError:
        return arguments


def _unify_numbers(value: Any) -> Any:
    """Return a value of JSON with 1 for 1.0, as JavaScript writes it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        entries: Mapping[str, Any] = value
        return {key: _unify_numbers(entry) for key, entry in entries.items()}
    if isinstance(value, list):
        return [_unify_numbers(entry) for entry in value]
    return value


@dataclass(kw_only=True, eq=False)
class MessageNode:
    """A turn of the policy, or the messages between two turns.

    Messages between two turns are one node: some templates render several results of tools as one message, of which
    each alone would have no tokens.

    Example:
        >>> graph = MessageGraph()
        >>> question = graph.add_context(graph.root, [{"role": "user", "content": "2 + 2 ="}], [4, 5])
        >>> turn = graph.add_turn(
        ...     question,
        ...     {"role": "assistant", "content": "4"},
        ...     token_ids=[6, 1],
        ...     log_probs=[-0.5, -0.1],
        ...     weight_versions=[0, 0],
        ...     finish_reason="stop",
        ...     response_id="r1",
        ... )
        >>> turn.path_tokens()
        [4, 5, 6, 1]
        >>> [node.number for node in turn.path()]
        [0, 1]
    """

    number: int
    """Place in the order in which the nodes of the graph were made; -1: its root, which has no tokens."""
    parent: "MessageNode | None"
    messages: Sequence[Message]
    token_ids: Sequence[int]
    """Its own tokens, after those of its ancestors: for messages, with what the template writes around them."""
    log_probs: Sequence[float] = ()
    """One for each token of a turn of the policy."""
    weight_versions: Sequence[int] = ()
    routed_experts: NDArray[np.int16] | None = None
    """[N, L, K] experts of the N tokens before the last one of the path; those of tokens before these are of earlier
    turns. None: unknown."""
    finish_reason: str = ""
    stop_string: str = ""
    """The agent's string that ended the turn. The message is without it; some agents add it again."""
    response_id: str = ""
    """Name of the turn in the API; empty: the policy did not sample the node."""
    is_delivered: bool = False
    """Whether the agent got the whole turn."""
    image_starts: Sequence[int] = ()
    """Where the images of its messages start among its own tokens."""
    agent: str = ""
    """Name of the agent that asked for the turn; empty: it has none."""
    start_s: float = 0.0
    """When a turn was asked for, in seconds of `Session.clock`."""
    end_s: float = 0.0
    children: list["MessageNode"] = field(default_factory=list["MessageNode"])

    def __post_init__(self) -> None:
        self.keys = [message_key(message) for message in self.messages]
        self.keys_with_stop = self.keys
        if self.stop_string:
            [message] = self.messages
            content = f"{message['content']}{self.stop_string}"
            self.keys_with_stop = [message_key({**message, "content": content})]
        self.num_tokens: int = len(self.token_ids)
        """Tokens of the whole path to this node, its own included."""
        self.num_images: int = len(self.image_starts)
        """Images of the whole path."""
        self.num_turns: int = int(self.is_turn)
        """Turns on the path to this node, itself included."""
        self.num_routed: int = 0
        """Tokens of the path, from the first one on, whose experts it has."""
        self.depth: int = 0
        """Nodes on the path to this node, itself included; of the root 0."""
        if self.parent is not None:
            self.num_tokens += self.parent.num_tokens
            self.num_images += self.parent.num_images
            self.num_turns += self.parent.num_turns
            self.num_routed = self.parent.num_routed
            self.depth = self.parent.depth + 1
        if self.routed_experts is not None:
            self.num_routed = self.num_tokens - 1

    @property
    def is_turn(self) -> bool:
        """True if the policy sampled the tokens."""
        return bool(self.response_id)

    def path(self) -> "list[MessageNode]":
        """Return the nodes from the first one to this one."""
        nodes: list[MessageNode] = []
        node: MessageNode | None = self
        while node is not None and node.number >= 0:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def path_images(self) -> tuple[list[bytes], list[int]]:
        """Return the image files from the first node to this one, and where each starts among the path's tokens."""
        images: list[bytes] = []
        starts: list[int] = []
        for node in self.path():
            offset = node.num_tokens - len(node.token_ids)
            starts += [offset + start for start in node.image_starts]
            if node.image_starts:
                images += list_images(node.messages)
        return images, starts

    def path_tokens(self) -> list[int]:
        """Return the tokens from the first one to this node's last."""
        tokens: list[int] = []
        for node in self.path():
            tokens.extend(node.token_ids)
        return tokens


class MessageGraph:
    """The nodes of a session.

    Example:
        >>> graph = MessageGraph()
        >>> question = [{"role": "user", "content": "2 + 2 ="}]
        >>> node = graph.add_context(graph.root, question, [4, 5])
        >>> further = [*question, {"role": "user", "content": "Well?"}]
        >>> found, num_messages = graph.find(further)
        >>> found is node, num_messages
        (True, 1)
    """

    def __init__(self) -> None:
        self.root = MessageNode(number=-1, parent=None, messages=(), token_ids=())
        """Has no messages and no tokens; the conversations' first nodes are its children."""
        self.nodes: list[MessageNode] = []
        self.findings: Counter[Finding] = Counter()
        """How often an agent, or the history, began a branch, by what differed."""
        self.num_tokens = 0
        """Tokens of all nodes."""
        self._turns: dict[str, MessageNode] = {}

    def turns(self) -> Iterator[MessageNode]:
        """Yield the policy's turns, in the order in which they were sampled."""
        return (node for node in self.nodes if node.is_turn)

    def find_turn(self, response_id: str) -> MessageNode | None:
        """Return the turn of this name; None: there is none."""
        return self._turns.get(response_id)

    def find(
        self,
        messages: Sequence[Message],
        accept_first: Callable[[MessageNode], bool] | None = None,
        *,
        agent: str = "",
    ) -> tuple[MessageNode, int]:
        """Return the last node of the longest path that these messages start with, and how many they are.

        Of equal turns, which were sampled for the same messages, it is the latest that the agent got.

        Args:
            accept_first: returns whether the first node of a conversation, whose messages are equal, starts the path.
            agent: whose turns are preferred to equal ones of others.
        """
        keys = [message_key(message) for message in messages]
        best = self.root
        best_rank = (0, True, True, best.number)
        waiting = [(self.root, 0)]
        while waiting:
            node, position = waiting.pop()
            is_received = node.is_delivered or not node.is_turn
            rank = (position, is_received, node.agent == agent, node.number)
            if rank > best_rank:
                best = node
                best_rank = rank
            for child in node.children:
                if not _starts_with(messages, keys, position, child):
                    continue
                if node is self.root and accept_first is not None and not accept_first(child):
                    continue
                waiting.append((child, position + len(child.messages)))
        return best, best_rank[0]

    def find_tokens(self, token_ids: Sequence[int]) -> MessageNode:
        """Return the node whose path's tokens are the longest that these tokens start with; it may be the root."""
        tokens = list(token_ids)
        best = self.root
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            if node.num_tokens > best.num_tokens:
                best = node
            start = node.num_tokens
            waiting.extend(
                child
                for child in node.children
                if tokens[start : child.num_tokens] == list(child.token_ids)
            )
        return best

    def find_prefix(self, node: MessageNode, token_ids: Sequence[int]) -> MessageNode:
        """Return the last node on the path to a node whose path's tokens all start these; it may be the root."""
        last = self.root
        for ancestor in node.path():
            start = ancestor.num_tokens - len(ancestor.token_ids)
            if list(token_ids[start : ancestor.num_tokens]) != list(ancestor.token_ids):
                break
            last = ancestor
        return last

    def add_context(
        self,
        parent: MessageNode,
        messages: Sequence[Message],
        token_ids: Sequence[int],
        *,
        image_starts: Sequence[int] = (),
    ) -> MessageNode:
        """Add messages that the policy did not sample, and their tokens; an equal node is not added again."""
        keys = [message_key(message) for message in messages]
        for child in parent.children:
            if child.keys == keys and not child.is_turn and child.token_ids == token_ids:
                return child
        return self.add_node(
            parent, messages=tuple(messages), token_ids=token_ids, image_starts=image_starts
        )

    def add_turn(self, parent: MessageNode, message: Message, **fields: Any) -> MessageNode:
        """Add a turn of the policy after its context, with further fields of `MessageNode`."""
        return self.add_node(parent, messages=(message,), **fields)

    def add_node(self, parent: MessageNode, **fields: Any) -> MessageNode:
        """Add a node after another one, with the fields of `MessageNode`."""
        node = MessageNode(number=len(self.nodes), parent=parent, **fields)
        parent.children.append(node)
        self.nodes.append(node)
        self.num_tokens += len(node.token_ids)
        if node.is_turn:
            self._turns[node.response_id] = node
        return node

    def count_fork(self, node: MessageNode, messages: Sequence[Message]) -> None:
        """Count why messages, which come after a node, are none of its children that are there."""
        turns = [child.messages[0] for child in node.children if child.is_turn]
        message = messages[0]
        if message["role"] == "assistant" and turns:
            latest = turns[-1]
            if message_key(message) == message_key(latest):
                self.findings["fork_reasoning"] += 1
            elif message_key({**message, "content": ""}) == message_key({**latest, "content": ""}):
                self.findings["fork_text"] += 1
            else:
                self.findings["fork_calls"] += 1
        elif node.children:
            self.findings[self._name_change(node, messages)] += 1

    def count_findings(self) -> dict[Finding, int]:
        """Return how many branches there are of each cause, also 0."""
        return {finding: self.findings[finding] for finding in get_args(Finding)}

    def _name_change(self, node: MessageNode, messages: Sequence[Message]) -> Finding:
        """Return what messages differ in from the most similar that come after a node."""
        keys = [message_key(message) for message in messages]
        finding: Finding = "fork_context"
        most_equal = 0
        for child in node.children:
            num_equal = 0
            for key, stored_key in zip(keys, child.keys, strict=False):
                if key != stored_key:
                    break
                num_equal += 1
            if child.is_turn or num_equal < most_equal:
                continue
            most_equal = num_equal
            finding = "fork_context"
            if num_equal == len(child.keys):
                finding = "fork_tools"
            elif num_equal < len(keys):
                roles = {messages[num_equal]["role"], child.messages[num_equal]["role"]}
                if roles == {"system"}:
                    finding = "fork_system"
        return finding


def _starts_with(
    messages: Sequence[Message], keys: Sequence[MessageKey], position: int, child: MessageNode
) -> bool:
    """Return whether the messages from a position on start with those of a node; some nodes have tokens alone."""
    sent_keys = keys[position : position + len(child.keys)]
    if not child.keys or sent_keys not in (child.keys, child.keys_with_stop):
        return False
    return not child.is_turn or has_equal_reasoning(messages[position], child.messages[0])
