"""Cases of the conformance suite."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gcore_agents.conformance.agent import CaseAgent
from gcore_agents.conformance.turns import ModelTurn
from gcore_agents.session import History

MESSAGES = ("chat", "responses", "anthropic", "google")
"""Dialects of messages; the other one, completions, has prompts of text or tokens."""
Need: TypeAlias = Literal["system", "tools", "results"]

DriveAgent: TypeAlias = Callable[[CaseAgent], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One conversation or several, what the engine answers, and the tree of turns that has to result.

    Example:
        >>> async def look(agent: CaseAgent) -> None:
        ...     await agent.start()
        >>> case = Case(name="none", summary="No turn.", script=[ModelTurn(text="4")], drive=look, parents=[])
        >>> case.dialects
        ('chat', 'responses', 'anthropic', 'google')
    """

    name: str
    summary: str
    """The rule that has to hold, in a sentence."""
    script: Sequence[ModelTurn]
    drive: DriveAgent
    parents: Sequence[int]
    """For each turn, in the order of sampling, the one that it continues; -1: none."""
    dialects: Sequence[str] = MESSAGES
    siblings: Sequence[Sequence[int]] = ()
    """Pairs of turns that follow the same node."""
    undelivered: Sequence[int] = ()
    """Turns that no client got."""
    needs: Sequence[Need] = ()
    """The parts of conversations that the chat template has to render."""
    delay_s: float = 0.0
    """Seconds that the engine waits before a turn."""
    max_calls: int = 0
    """Most turns of the session; 0: any number."""
    history: History = "sampled"
    is_scripted: bool = False
    """Whether it says nothing about an endpoint whose model or settings are not known."""
