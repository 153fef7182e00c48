"""Routes of a session for its runner, over HTTP: its state, its graph, rewards and its end."""

import time
from typing import Any, get_args

from gcore_agents.chat.images import convert_images, digest_image
from gcore_agents.dialects.chat_completions import ChatCompletionsDialect
from gcore_agents.dialects.fields import JsonFields
from gcore_agents.session import Session, SessionReward, SessionStatus

_NODE_FIELDS = ("number", "response_id", "finish_reason", "is_delivered", "agent")
_TOKEN_FIELDS = ("token_ids", "log_probs", "weight_versions")


def describe_session(session: Session, fields: JsonFields) -> dict[str, Any]:
    """Return the state of a session."""
    del fields
    return {
        "session_id": session.session_id,
        "state": "closed" if session.is_closed else "open",
        "status": session.status,
        "end": session.end,
        "calls": sum(1 for _ in session.graph.turns()),
        "tokens": session.num_used_tokens,
        "idle_s": time.monotonic() - session.last_call_s,
        "score": session.score,
        "findings": dict(session.graph.findings),
        "unused": session.unused,
    }


def describe_graph(session: Session, fields: JsonFields) -> dict[str, Any]:
    """Return the nodes of a session's graph, with ``tokens=1`` also their tokens."""
    with_tokens = fields.read_text("tokens") == "1"
    nodes: list[dict[str, Any]] = []
    for node in session.graph.nodes:
        assert node.parent is not None
        entry: dict[str, Any] = {
            "parent": node.parent.number,
            "messages": convert_images(node.messages, digest_image),
            "num_tokens": len(node.token_ids),
        }
        for name in _NODE_FIELDS:
            entry[name] = getattr(node, name)
        if with_tokens:
            for name in _TOKEN_FIELDS:
                entry[name] = list(getattr(node, name))
        nodes.append(entry)
    return {"session_id": session.session_id, "nodes": nodes}


def add_reward(session: Session, fields: JsonFields) -> dict[str, Any]:
    """Add a reward of the session, of the turn ``response_id`` or of ``agent``."""
    value: Any = fields.values.get("value")
    if isinstance(value, bool):
        fields.fail("value", "a finite number")
    reward = SessionReward(
        value=value,
        response_id=fields.read_text("response_id") or "",
        agent=fields.read_text("agent") or "",
        name=fields.read_text("name") or "reward",
    )
    session.add_reward(reward)
    return {"score": session.score}


def close_session(session: Session, fields: JsonFields) -> dict[str, Any]:
    """End a session; calls that are being answered end with an error."""
    status: Any = fields.read_text("status") or "completed"
    if status not in get_args(SessionStatus):
        fields.fail("status", " or ".join(get_args(SessionStatus)))
    session.close(status)
    return describe_session(session, fields)


def tokenize(session: Session, fields: JsonFields) -> dict[str, Any]:
    """Return the tokens of ``prompt``, or of ``messages`` with ``tools``, as vLLM's route does."""
    if fields.has("prompt"):
        add_special_tokens = fields.values.get("add_special_tokens") is not False
        text = fields.read_text("prompt") or ""
        tokens = session.encoder.encode(text, add_special_tokens=add_special_tokens)
    else:
        call = ChatCompletionsDialect(session).read_call(fields.values)
        tokens = session.list_prompt_tokens(call)
    return {
        "tokens": tokens,
        "count": len(tokens),
        "max_model_len": session.budget.max_context,
    }


def detokenize(session: Session, fields: JsonFields) -> dict[str, Any]:
    """Return the text of ``tokens``, with special ones."""
    tokens = fields.read_token_ids("tokens", session.encoder.vocab_size)
    return {"prompt": session.encoder.turn_text(tokens, is_ended=False)}
