"""Generation in several turns: a policy that acts in an environment, or calls tools."""

from gcore_rollout.multi_turn.chat import ChatEncoder, Message
from gcore_rollout.multi_turn.environment import Environment, Opening, Reply
from gcore_rollout.multi_turn.episode import Episode, EpisodeEnd, EpisodeLimits, run_episode
from gcore_rollout.multi_turn.revision import RevisionEnvironment
from gcore_rollout.multi_turn.tools import Tool, ToolCall, ToolEnvironment, hermes_calls

__all__ = [
    "ChatEncoder",
    "Environment",
    "Episode",
    "EpisodeEnd",
    "EpisodeLimits",
    "Message",
    "Opening",
    "Reply",
    "RevisionEnvironment",
    "Tool",
    "ToolCall",
    "ToolEnvironment",
    "hermes_calls",
    "run_episode",
]
