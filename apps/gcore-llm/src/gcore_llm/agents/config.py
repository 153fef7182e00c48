"""Settings of responses of several turns."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from gcore_runs import Bound, Checked, Count, Fraction, NonNegative, Positive

_BY_REWARDS = ("turns", "branches")
"""Kinds of credit that are made of the agents' rewards."""
_COMMAND = "command:"
_FINITE = Bound(math.isfinite, "a finite number")


@dataclass(frozen=True, kw_only=True)
class MultiTurnConfig(Checked, section="rollout.multi_turn"):
    """Responses of several turns, in an environment, with tools, or by an agent.

    Example:
        >>> MultiTurnConfig(max_revisions=2, max_tokens_per_turn=64).is_used
        True
    """

    environment: str = ""
    """PATH.py:function, which makes from a row an environment of one episode (gcore_agents.Environment),
    such as a ToolEnvironment; it rewards turns, and the reward, if there is one, scores the last. Empty: one turn."""
    max_revisions: NonNegative = 0
    """Instead of an environment: how many times a response is returned with its reward's feedback, such as a judge's
    verdict, for the policy to revise; the last one's score counts."""
    good_enough: Annotated[float, _FINITE] = 1.0
    """A response of this score is not revised."""
    max_assistant_turns: Count = 8
    """Most turns of the policy; together with what they answer, they have data.max-response-length tokens."""
    max_tokens_per_turn: NonNegative = 0
    """Most tokens of one turn; 0: what is left."""
    step_timeout_s: Positive = 60.0
    """Seconds for the environment to answer one turn."""
    history: Literal["sampled", "template", "tool_cycle"] = "sampled"
    """How the policy sees its earlier turns. sampled: as it wrote them, with its reasoning. template: as the chat
    template renders them now; where that leaves out reasoning, as most do, a new branch begins, whose start is trained
    once. tool_cycle: as written until the next message of the user, and then as the template renders them. The same in
    evaluation: choose what the model is served with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_alone = not (self.environment and self.max_revisions)
        expected = f"0 with rollout.multi_turn.environment {self.environment!r}"
        self.require("max_revisions", is_alone, expected)

    @property
    def is_used(self) -> bool:
        """True if an environment or the reward answers turns."""
        return bool(self.environment or self.max_revisions)

    @property
    def has_branches(self) -> bool:
        """True if an episode may have several conversations.

        The first one may then be of data.max_length tokens, and others have those of a response besides.
        """
        return self.is_used and self.history != "sampled"


@dataclass(frozen=True, kw_only=True)
class AgentConfig(Checked, section="rollout.agent"):
    """An agent that gets a URL and a key; its calls, as many as rollout.multi_turn allows, make one response.

    Example:
        >>> AgentConfig(run="command: mini -t solve").command
        'mini -t solve'
    """

    run: str = ""
    """PATH.py:function, which is called with a gcore_agents.AgentTask and returns the reward, several by name, or None;
    or 'command: ...', a shell command that finds OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and the like in
    its environment, and its row in the file $GCORE_ROW. The run's reward, if there is one, scores the last turn, too.
    Empty: no agent."""
    timeout_s: Positive = 600.0
    """Seconds of an agent's work on a row; then its calls are answered by a text that ends its loop. One that works
    for as long again, or a minute, has failed; see reward_calls. With rollout.partial_rollout, time in which its calls
    wait for the next step does not count."""
    max_concurrency: NonNegative = 0
    """Most agents at once in a controller; 0: four commands a CPU, and functions without a limit."""
    credit: str = "session"
    """The value of a turn. session: the score of the whole session. turns: the rewards of this turn and of those that
    continue it. branches: the rewards of its agent, or without any those of the session. PATH.py:function: what your
    function returns, a number for each turn of a gcore_agents.Session. But for session, it counts against the mean of
    the group, of each agent by itself if calls name theirs (x-gcore-agent); with algorithm.adv_estimator gigpo, against
    turns at the same state, next to the session's score; with rae, against a moving average of the returns of its agent
    and its row's data_source; with grpo_process, against all turns of the group."""
    turn_discount: Fraction = 1.0
    """Discount per turn, with credit turns."""

    @property
    def command(self) -> str:
        """The shell command; empty: the agent is a function."""
        if not self.run.startswith(_COMMAND):
            return ""
        return self.run.removeprefix(_COMMAND).strip()

    def __post_init__(self) -> None:
        super().__post_init__()
        is_function = ".py:" in self.run
        is_named = not self.run or is_function or bool(self.command)
        self.require("run", is_named, "PATH.py:function, or 'command: ...'")
        is_known = self.credit in ("session", *_BY_REWARDS) or ".py:" in self.credit
        self.require("credit", is_known, "session, turns, branches, or PATH.py:function")

    def check_with(self, config: Any) -> None:
        """Raise a `UserError` if settings of a run do not fit its agent, or add to rewards of turns."""
        is_one = not (self.run and config.rollout.multi_turn.is_used)
        self.require("run", is_one, "'' with rollout.multi_turn.environment or max_revisions")
        # A return along a conversation has no meaning across its branches.
        is_outcome = not (self.run and config.algorithm.estimator.needs_critic)
        config.require("algorithm.adv_estimator", is_outcome, "one without a critic, with an agent")
        estimator = config.algorithm.estimator
        has_turns = not estimator.reads_turns or self.credit != "session"
        expected = "another one without an agent whose rollout.agent.credit is turns"
        config.require("algorithm.adv_estimator", has_turns, expected)
        has_steps = self.credit == "turns" and not self.turn_discount
        if not config.rollout.has_several_turns:
            # The folder of a classifier says whether it scores steps.
            model = config.reward_model
            has_steps = model.kind == "classifier" or model.judge.method == "steps"
        expected = (
            "another one unless one turn is scored by a reward_model.kind classifier or reward_model.judge.method "
            "steps, or an agent's turns with rollout.agent.credit turns and turn_discount 0"
        )
        config.require("algorithm.adv_estimator", has_steps or not estimator.reads_steps, expected)
        if self.credit not in _BY_REWARDS:
            return
        added = {
            "reward": config.reward,
            "reward_model": config.reward_model.is_used,
            "task.name": config.task.name,
            "algorithm.kl_ctrl.kl_coef": config.algorithm.kl_ctrl.kl_coef,
            "algorithm.overlong.buffer_len": config.algorithm.overlong.buffer_len,
        }
        for name, value in added.items():
            reason = f"session with {name}: turns are credited with the agent's rewards alone"
            self.require("credit", not value, reason)
