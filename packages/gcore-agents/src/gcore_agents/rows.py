"""From the graph of a session to what is trained on: one tree of tokens, each of them once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gcore_agents.chat.images import list_images
from gcore_agents.graph import MessageGraph, MessageNode
from gcore_agents.session import Session


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionTokens:
    """The tokens of a session as a prompt [P] and a tree of R tokens.

    Example:
        >>> graph = MessageGraph()
        >>> question = graph.add_context(graph.root, [{"role": "user", "content": "2 + 2 ="}], [4, 5])
        >>> numbers = {"log_probs": [-0.5, -0.1], "weight_versions": [0, 0], "finish_reason": "stop"}
        >>> for answer in ("4", "5"):
        ...     message = {"role": "assistant", "content": answer}
        ...     turn = graph.add_turn(question, message, token_ids=[6, 1], response_id=answer, **numbers)
        ...     turn.is_delivered = True
        >>> tree = collect_tokens(graph, trained=set(graph.turns()))
        >>> tree.token_ids, tree.forks
        (array([6, 1, 6, 1]), array([[ 2, -1]]))
    """

    prompt_ids: NDArray[np.int64]
    """Tokens before the first turn."""
    token_ids: NDArray[np.int64]
    """[R]."""
    mask: NDArray[np.bool_]
    """[R] tokens that the policy sampled."""
    log_probs: NDArray[np.float32]
    """[R], 0 where the policy did not sample."""
    weight_versions: NDArray[np.int32]
    """[R], -1 where the policy did not sample."""
    routed_experts: NDArray[np.int16] | None
    """[P + R, L, K] experts that each token passed through in the L layers of a mixture of experts; -1 where no turn
    was sampled after it. None: there are none."""
    forks: NDArray[np.int64]
    """[F, 2]: token ``forks[i, 0]`` follows token ``forks[i, 1]``, and not the one before it; -1: it follows the
    prompt; -2: it follows nothing."""
    images: Sequence[bytes]
    """The image files of prompt and tree, each once."""
    image_starts: Sequence[int]
    """Where each image starts among the P + R tokens."""
    turns: Sequence[MessageNode]
    """The turns that are trained on, in the order of their tokens."""
    turn_starts: Sequence[int]
    """Where each of them starts among the R tokens."""


def choose_trained(session: Session) -> set[MessageNode]:
    """Return the turns of a session that are trained on.

    Those are all that the agent got, but for turns that it has sampled again and not continued: unless a turn has a
    reward of its own, only the last one of several for the same messages counts if none is continued. Each agent of a
    session may ask the same.
    """
    rewarded = {reward.response_id for reward in session.rewards if reward.response_id}
    trained: set[MessageNode] = set()
    for node in session.graph.turns():
        if not node.is_delivered:
            continue
        assert node.parent is not None
        is_last = all(
            turn.number <= node.number
            for turn in node.parent.children
            if turn.is_delivered and turn.agent == node.agent
        )
        is_named = node.response_id in session.kept_responses or node.response_id in rewarded
        if node.children or is_last or is_named:
            trained.add(node)
    return trained


def collect_tokens(graph: MessageGraph, *, trained: set[MessageNode]) -> SessionTokens | None:
    """Return the tree of these turns and all that they follow; None: there is no turn with a token."""
    kept = {node for turn in trained for node in turn.path()}
    ordered = _in_depth_first_order(graph, kept)
    if not ordered or not any(node.token_ids for node in trained):
        return None
    prompt = ordered[0]
    last_place: dict[MessageNode, int] = {graph.root: -2, prompt: -1}
    starts: dict[MessageNode, int] = {}
    tokens: list[int] = []
    mask: list[bool] = []
    log_probs: list[float] = []
    versions: list[int] = []
    forks: list[tuple[int, int]] = []
    turns: list[MessageNode] = []
    turn_starts: list[int] = []
    images: list[bytes] = []
    image_starts: list[int] = []
    for node in ordered:
        starts[node] = len(tokens) + (node is not prompt) * len(prompt.token_ids)
        if node.image_starts:
            images += list_images(node.messages)
            image_starts += [starts[node] + start for start in node.image_starts]
        if node is prompt:
            continue
        assert node.parent is not None
        parent_place = last_place[node.parent]
        size = len(node.token_ids)
        if size and parent_place != len(tokens) - 1:
            forks.append((len(tokens), parent_place))
        if node in trained:
            turns.append(node)
            turn_starts.append(len(tokens))
        tokens += node.token_ids
        mask += [node in trained] * size
        log_probs += node.log_probs or [0.0] * size
        versions += node.weight_versions or [-1] * size
        last_place[node] = len(tokens) - 1 if size else parent_place
    return SessionTokens(
        prompt_ids=np.array(prompt.token_ids, np.int64),
        token_ids=np.array(tokens, np.int64),
        mask=np.array(mask, np.bool_),
        log_probs=np.array(log_probs, np.float32),
        weight_versions=np.array(versions, np.int32),
        routed_experts=_collect_experts(starts, len(prompt.token_ids) + len(tokens)),
        forks=np.array(forks, np.int64).reshape(-1, 2),
        images=images,
        image_starts=image_starts,
        turns=turns,
        turn_starts=turn_starts,
    )


def _collect_experts(starts: Mapping[MessageNode, int], size: int) -> NDArray[np.int16] | None:
    """Return the experts of all tokens, by where each node starts among them; None: there are none."""
    experts: NDArray[np.int16] | None = None
    for turn in starts:
        rows = turn.routed_experts
        if rows is None:
            continue
        if experts is None:
            experts = np.full((size, *rows.shape[1:]), -1, np.int16)
        spans = [starts[node] + np.arange(len(node.token_ids)) for node in turn.path()]
        experts[np.concatenate(spans)[-1 - len(rows) : -1]] = rows
    return experts


def _in_depth_first_order(graph: MessageGraph, kept: set[MessageNode]) -> list[MessageNode]:
    """Return nodes so that each comes after its parent, and a conversation is in one piece where it can be."""
    ordered: list[MessageNode] = []
    waiting = [graph.root]
    while waiting:
        node = waiting.pop()
        if node is not graph.root:
            ordered.append(node)
        waiting.extend(child for child in reversed(node.children) if child in kept)
    return ordered
