"""The trace of an endpoint, as far as it shows one, and the checks of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gcore_agents.chat.tool_calls import count_common
from gcore_agents.conformance.errors import MismatchError
from gcore_agents.conformance.scripted import EngineCall

_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class TraceNode:
    """A node of a session's graph, as ``GET /session/graph?tokens=1`` shows it.

    Example:
        >>> node = TraceNode(number=0, parent=-1, token_ids=(4, 5), is_delivered=False)
        >>> node.is_turn
        False
    """

    number: int
    parent: int
    token_ids: tuple[int, ...]
    is_delivered: bool
    response_id: str = ""
    """Name of a turn; empty: no policy sampled the node."""

    @property
    def is_turn(self) -> bool:
        return bool(self.response_id)


def read_nodes(body: Mapping[str, Any]) -> dict[int, TraceNode]:
    """Return the nodes of a graph by their numbers."""
    nodes: dict[int, TraceNode] = {}
    for entry in body["nodes"]:
        nodes[entry["number"]] = TraceNode(
            number=entry["number"],
            parent=entry["parent"],
            token_ids=tuple(entry["token_ids"]),
            is_delivered=entry["is_delivered"],
            response_id=entry["response_id"],
        )
    return nodes


@dataclass(kw_only=True)
class EndpointTrace:
    """The turns of a case: what the engine was given and gave, and the graph.

    Example:
        >>> trace = EndpointTrace(calls=[EngineCall(prompt_ids=(4, 5), token_ids=(6, 1))])
        >>> trace.calls.append(EngineCall(prompt_ids=(4, 5, 6, 1, 8), token_ids=(9, 1)))
        >>> trace.check(parents=[-1, 0])
    """

    calls: list[EngineCall] = field(default_factory=list[EngineCall])
    """In the order of the engine's work, or of the replies."""
    nodes: dict[int, TraceNode] | None = None
    """None: the endpoint shows no graph."""
    first_node: int = 0
    """Nodes before this one are of earlier cases."""

    def update(self, nodes: Mapping[int, TraceNode]) -> None:
        """Take the graph as it is now; `MismatchError` if a node is not what it was."""
        for number, old in (self.nodes or {}).items():
            new = nodes.get(number)
            if new is None:
                raise MismatchError(f"node {number} is gone")
            if new.token_ids != old.token_ids:
                raise MismatchError(
                    f"node {number} has changed: {_describe_difference(new.token_ids, old.token_ids)}"
                )
            if new.parent != old.parent:
                raise MismatchError(
                    f"node {number} has moved from node {old.parent} to {new.parent}"
                )
        self.nodes = dict(nodes)

    def check(
        self,
        *,
        parents: Sequence[int],
        siblings: Sequence[Sequence[int]] = (),
        undelivered: Sequence[int] = (),
    ) -> None:
        """Raise a `MismatchError` for the first thing that is not as it should be.

        Args:
            parents: for each turn the one that it continues; -1: none.
            siblings: pairs of turns that follow the same node.
            undelivered: turns that no client got.
        """
        if len(self.calls) != len(parents):
            raise MismatchError(
                f"the engine was asked {len(self.calls)} times; expected {len(parents)}"
            )
        if self.nodes is None:
            self._check_prefixes(parents)
            return
        turns = self._match_turns()
        for index, node in enumerate(turns):
            parent = self._find_turn_before(node)
            expected = turns[parents[index]] if parents[index] >= 0 else None
            if parent is not expected:
                raise MismatchError(
                    f"turn {index} continues {_name_turn(parent, turns)}; expected {_name_turn(expected, turns)}"
                )
            if node.is_delivered == (index in undelivered):
                word = "delivered" if node.is_delivered else "not delivered"
                raise MismatchError(f"turn {index} counts as {word}")
        for first, second in siblings:
            if turns[first].parent != turns[second].parent:
                raise MismatchError(
                    f"turns {first} and {second} follow different nodes; expected one"
                )

    def _check_prefixes(self, parents: Sequence[int]) -> None:
        for index, parent in enumerate(parents):
            if parent < 0:
                continue
            before = self.calls[parent]
            path = (*before.prompt_ids, *before.token_ids)
            prompt = self.calls[index].prompt_ids
            if prompt[: len(path)] != path:
                raise MismatchError(
                    f"the prompt of turn {index} does not start with turn {parent} as it was sampled: "
                    f"{_describe_difference(prompt, path)}"
                )

    def _match_turns(self) -> list[TraceNode]:
        """Return the node of each of the engine's turns, after a check that their paths are what it was given."""
        nodes = self.nodes or {}
        waiting = [
            node for node in nodes.values() if node.is_turn and node.number >= self.first_node
        ]
        if len(waiting) != len(self.calls):
            raise MismatchError(
                f"the graph has {len(waiting)} turns; expected {len(self.calls)}, one for each of the engine's"
            )
        turns: list[TraceNode] = []
        for index, call in enumerate(self.calls):
            matches = [node for node in waiting if node.token_ids == call.token_ids]
            exact = [node for node in matches if self.path_before(node) == call.prompt_ids]
            if not matches:
                nearest = waiting[0].token_ids
                raise MismatchError(
                    f"no node has the tokens of turn {index}: {_describe_difference(nearest, call.token_ids)}"
                )
            if not exact:
                path = self.path_before(matches[0])
                raise MismatchError(
                    f"the path to turn {index} is not what the engine was given: "
                    f"{_describe_difference(path, call.prompt_ids)}"
                )
            turns.append(exact[0])
            waiting.remove(exact[0])
        return turns

    def path_before(self, node: TraceNode) -> tuple[int, ...]:
        """Return the tokens from the first one to the one before a node."""
        path: list[int] = []
        for ancestor in reversed([*self._ancestors(node)]):
            path.extend(ancestor.token_ids)
        return tuple(path)

    def _find_turn_before(self, node: TraceNode) -> TraceNode | None:
        return next((ancestor for ancestor in self._ancestors(node) if ancestor.is_turn), None)

    def _ancestors(self, node: TraceNode) -> Iterator[TraceNode]:
        """Yield the nodes before a node, the nearest one first."""
        nodes = self.nodes or {}
        ancestor = nodes.get(node.parent)
        while ancestor is not None:
            yield ancestor
            ancestor = nodes.get(ancestor.parent)


def _name_turn(node: TraceNode | None, turns: Sequence[TraceNode]) -> str:
    if node is None:
        return "no turn"
    for index, turn in enumerate(turns):
        if turn is node:
            return f"turn {index}"
    return f"node {node.number}"


def _describe_difference(actual: tuple[int, ...], expected: tuple[int, ...]) -> str:
    """Return a text for the first difference of two lists of tokens."""
    position = count_common(actual, expected)
    actual_part = list(actual[position : position + _SHOWN])
    expected_part = list(expected[position : position + _SHOWN])
    difference = f"from token {position} on {actual_part}, expected {expected_part}"
    return f"{len(actual)} tokens, expected {len(expected)}; {difference}"
