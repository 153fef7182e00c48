"""Responses of several turns: agents, environments and revisions, each an episode in a session of its own."""

import asyncio
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore_agents import (
    AgentFailedError,
    AgentTask,
    CallError,
    ChatEncoder,
    Environment,
    MessageError,
    RevisionEnvironment,
    SampledTokens,
    Session,
    SessionBudget,
    SessionJournal,
    check_template,
    choose_trained,
    collect_tokens,
    normalize_messages,
    restore_session,
    run_command,
    run_episode,
    run_function,
)
from gcore_llm.agents.config import AgentConfig, MultiTurnConfig
from gcore_rollout import (
    Completion,
    Engine,
    EpisodeError,
    EpisodeRole,
    OnError,
    Prompt,
    PromptImages,
    Request,
    RequestError,
    RewardError,
    RewardRunner,
    RolloutError,
    SamplingParams,
    VisionProcessor,
    load_function,
)
from gcore_runs import UserError

if TYPE_CHECKING:
    from gcore_agents import AgentServer

_GRACE_S = 60.0
"""Most seconds that an agent has to end after its last call."""
_Drive = Callable[[Session, Prompt], Awaitable[list[str]]]
"""Acts as the agent of a session, and returns the texts of the turns."""


def make_episodes(
    agent: AgentConfig,
    multi_turn: MultiTurnConfig,
    tokenizer: Any,
    reward: RewardRunner,
    *,
    is_rewarded: bool,
    prompt_key: str,
    max_context: int,
    on_error: OnError,
    chat_template_kwargs: Mapping[str, Any],
    vision: VisionProcessor | None = None,
    journal: SessionJournal | None = None,
) -> EpisodeRole | None:
    """Return what plays a run's episodes; None: responses have one turn.

    Args:
        tokenizer: of the policy, with a chat template, whose further variables are ``chat_template_kwargs``.
        reward: of the run, which scores what is revised.
        is_rewarded: whether the run has a reward; otherwise an agent has to return one.
        prompt_key: column of a row with the messages to answer.
        max_context: longest conversation, in tokens.
        vision: the policy's image processor; None: messages with images are refused.
        journal: keeps finished sessions of agents; None: they are not kept.
    """
    if not (agent.run or multi_turn.is_used):
        return None
    encoder = ChatEncoder(tokenizer, chat_template_kwargs=chat_template_kwargs, vision=vision)
    drive: _Drive
    runner: AgentRunner | None = None
    if agent.run:
        runner = AgentRunner(agent)
        drive = runner.run
    else:
        make: Callable[[Mapping[str, Any]], Environment]
        if multi_turn.max_revisions:
            make = partial(_make_revision, multi_turn, reward, prompt_key)
        else:
            make = load_function(multi_turn.environment, setting="rollout.multi_turn.environment")
        drive = partial(run_environment, make, multi_turn.step_timeout_s)
    credit = None
    if agent.credit == "turns":
        credit = partial(turn_returns, discount=agent.turn_discount)
    elif agent.credit == "branches":
        credit = agent_returns
    elif agent.credit != "session":
        credit = load_function(agent.credit, setting="rollout.agent.credit")
    player = EpisodePlayer(
        drive=drive,
        encoder=encoder,
        model=tokenizer.name_or_path,
        multi_turn=multi_turn,
        max_context=max_context,
        credit=credit,
        timeout_s=agent.timeout_s if agent.run else 0.0,
        is_agent=bool(agent.run),
        needs_score=bool(agent.run) and not is_rewarded,
        journal=journal if agent.run else None,
    )

    async def close() -> None:
        if runner is not None:
            await runner.close()
        if journal is not None:
            journal.close()

    return EpisodeRole(
        play=player.play,
        on_error=on_error,
        is_scored=bool(multi_turn.max_revisions),
        record_weights=player.record_weights,
        close=close,
    )


def check_conversations(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> None:
    """Raise a `UserError` if the chat template, with these further variables, cannot continue conversations."""
    if tokenizer.chat_template is None:
        return
    try:
        check_template(ChatEncoder(tokenizer, chat_template_kwargs=chat_template_kwargs))
    except MessageError as error:
        raise UserError(
            f"model has a chat template that cannot continue conversations: {error}"
        ) from None


@dataclass(kw_only=True, eq=False)
class EngineSampler:
    """An engine as sessions see it. A turn that `Engine.abort` cuts short, as a change of weights may, is continued."""

    engine: Engine
    sampling: SamplingParams
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    """Returns the context in which turns wait while `RunningEpisodes` holds them back."""
    error: RolloutError | None = None
    """Why the engine failed; the run's to handle, not the agent's."""
    num_turns: int = 0

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        stop: Sequence[str] = (),
        images: Sequence[bytes] = (),
        image_starts: Sequence[int] = (),
    ) -> SampledTokens:
        """Generate a whole turn, through as many requests as it takes."""
        number = self.num_turns
        self.num_turns += 1
        try:
            request = Request(
                request_id=f"{session}/{number}",
                session=session,
                prompt_token_ids=tuple(prompt_ids),
                sampling=replace(self.sampling, max_tokens=max_tokens, stop=tuple(stop)),
                seed=seed,
                images=tuple(images),
                image_starts=tuple(image_starts),
            )
            while True:
                await self._wait_for_engine()
                [completion] = [c async for c in self.engine.generate([request])]
                if completion.finish_reason != "abort":
                    break
                request = replace(request, prefixes=(completion,))
        except RequestError as error:
            raise CallError(str(error), code="context_length_exceeded") from error
        except RolloutError as error:
            self.error = error
            raise CallError(str(error), status=503) from error
        return SampledTokens(
            token_ids=completion.token_ids.tolist(),
            log_probs=completion.log_probs.tolist(),
            weight_versions=completion.weight_versions.tolist(),
            finish_reason=completion.finish_reason,
            routed_experts=completion.routed_experts,
        )

    async def _wait_for_engine(self) -> None:
        resumed: asyncio.Event | None = getattr(self.engine, "resumed", None)
        if resumed is not None and not resumed.is_set():
            with self.waiting():
                await resumed.wait()


@dataclass(kw_only=True, eq=False)
class EpisodePlayer:
    """Plays episodes, and makes a completion of the session of each."""

    drive: _Drive
    encoder: ChatEncoder
    multi_turn: MultiTurnConfig
    max_context: int
    credit: Callable[[Session], Sequence[float]] | None
    """Returns a value for each turn; None: all have the session's score."""
    timeout_s: float
    """Seconds after which calls are answered by a text that ends the agent's loop; 0: any time."""
    needs_score: bool
    """Whether a session without a reward has failed: it would not be worth 0."""
    model: str = ""
    """Folder of the policy, whose image processor reads what agents show."""
    is_agent: bool = False
    """Whether an agent decides what the conversations are, so that branches are counted."""
    journal: SessionJournal | None = None
    """Gives back the sessions that a process had finished when it was killed."""
    num_versions_skipped: int = 0
    """Difference between the engine's versions and steps; it grows when lost controllers are replaced."""

    def record_weights(self, step: int, version: int) -> None:
        """Record the version that the engine gave to the weights of a step."""
        self.num_versions_skipped = version - step

    async def play(
        self, policy: Engine, prompt: Prompt, request_id: str, sampling: SamplingParams, seed: int
    ) -> Completion:
        """Play one episode, see `EpisodeRole.play`."""
        sampler = EngineSampler(engine=policy, sampling=sampling)
        session = Session(
            session_id=request_id,
            sampler=sampler,
            encoder=self.encoder,
            budget=SessionBudget(
                max_tokens=sampling.max_tokens,
                max_calls=self.multi_turn.max_assistant_turns,
                max_tokens_per_turn=self.multi_turn.max_tokens_per_turn,
                max_context=self.max_context,
                timeout_s=self.timeout_s,
            ),
            history=self.multi_turn.history,
            seed=seed,
            stop=sampling.stop,
        )
        sampler.waiting = session.clock.stopped
        version = policy.weight_version
        step = version - self.num_versions_skipped
        # Evaluations have the same ids, for other prompts or temperatures.
        what = repr((prompt.token_ids, sampling, seed)).encode()
        key = f"{request_id} {blake2b(what, digest_size=8).hexdigest()}"
        if self.journal is not None:
            record = self.journal.find(key, step=step)
            if record is not None:
                began = version - step + record["step"]
                turns = restore_session(session, record, version=began)
                return self._make_completion(session, turns)
        try:
            turns = await self.drive(session, prompt)
        except AgentFailedError as error:
            if sampler.error is not None:
                raise sampler.error from error
            raise EpisodeError(str(error)) from (error.__cause__ or error)
        if sampler.error is not None:
            # An agent that handles it has worked without its model.
            raise sampler.error
        completion = self._make_completion(session, turns)
        if self.journal is not None:
            self.journal.add(key, session, step=step, version=version, turns=turns)
        return completion

    def _make_completion(self, session: Session, turns: list[str]) -> Completion:
        tree = collect_tokens(session.graph, trained=choose_trained(session))
        if tree is None:
            reason = (
                "the agent made no call, or its first messages are as long as the model's longest conversation, "
                f"{session.budget.max_context} tokens"
            )
            if session.last_error:
                reason = f"its last call was refused: {session.last_error}"
            raise EpisodeError(f"episode {session.session_id!r} has no turn: {reason}")
        if self.needs_score and session.score is None:
            raise EpisodeError(
                f"the agent of episode {session.session_id!r} returned no reward, and the run has none"
            )
        parts = {"turns": float(len(tree.turns)), "environment": session.score or 0.0}
        for reward in session.rewards:
            if reward.name != "reward":
                parts[reward.name] = parts.get(reward.name, 0.0) + reward.value
        findings = session.graph.findings
        if self.is_agent:
            # Those that there are none of, too: a mean is over the sessions that have a number.
            findings = session.graph.count_findings()
        for finding, count in findings.items():
            parts[f"agent/{finding}"] = float(count)
        values: dict[Any, float] = {}
        if self.credit is not None:
            values = dict(zip(session.graph.turns(), self.credit(session), strict=True))
        credit = np.zeros(tree.token_ids.shape, np.float32)
        spans: dict[str, list[tuple[int, int]]] = {}
        states: dict[str, list[int]] = {}
        for turn, start in zip(tree.turns, tree.turn_starts, strict=True):
            stop = start + len(turn.token_ids)
            credit[start:stop] = values.get(turn, 0.0)
            if turn.token_ids:
                spans.setdefault(turn.agent, []).append((start, stop))
            if turn.token_ids and values:
                assert turn.parent is not None
                state = _number_state(turn.agent, turn.parent.messages)
                states.setdefault(turn.agent, []).append(state)
        images = None
        if tree.images:
            starts = tuple(tree.image_starts)
            images = PromptImages(model=self.model, sources=tuple(tree.images), starts=starts)
        completion = Completion(
            request_id=session.session_id,
            index=0,
            finish_reason="stop" if session.end == "done" else "length",
            prompt_ids=tree.prompt_ids,
            token_ids=tree.token_ids,
            mask=tree.mask,
            log_probs=tree.log_probs,
            weight_versions=tree.weight_versions,
            routed_experts=tree.routed_experts,
            forks=tree.forks if tree.forks.size else None,
            credit=credit if values else None,
            images=images,
            agents={agent: np.array(turns) for agent, turns in spans.items()},
            states={agent: np.array(numbers) for agent, numbers in states.items()},
            turns=tuple(turns),
            score=session.score or 0.0,
            end=session.end,
        )
        for agent, value in completion.mean_credit().items():
            parts[f"agent/{agent}/return" if agent else "agent/return"] = value
        return replace(completion, parts=parts)


class AgentRunner:
    """Runs agents against an endpoint of this process, which starts with the first of them.

    Args:
        config: names the agent.
    """

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._server: AgentServer | None = None
        self._starting = asyncio.Lock()
        at_once = config.max_concurrency
        if config.command and not at_once:
            at_once = 4 * (os.cpu_count() or 1)
        self._slots = asyncio.Semaphore(at_once or sys.maxsize)
        self._run = partial(run_command, config.command)
        if not config.command:
            self._run = partial(
                run_function, load_function(config.run, setting="rollout.agent.run")
            )

    async def run(self, session: Session, prompt: Prompt) -> list[str]:
        """Run the agent in a session; see `_Drive`."""
        async with self._starting:
            if self._server is None:
                from gcore_agents import AgentServer

                server = AgentServer()
                await server.start()
                self._server = server
        base_url = self._server.open(session)
        task = AgentTask(row=prompt.row, base_url=base_url, api_key=session.key, session=session)
        try:
            timeout_s = self._config.timeout_s
            async with self._slots:
                await self._run(task, timeout_s=timeout_s + min(timeout_s, _GRACE_S))
        finally:
            self._server.release(session)
        if session.status == "failed":
            raise AgentFailedError("the agent closed its session with the status failed")
        if session.end is None:
            # One that says truncated has reached a limit of its own.
            session.end = "max_turns" if session.status == "truncated" else "done"
        last = [node for node in session.graph.turns() if node.is_delivered][-1:]
        return [session.turn_text(node.response_id) for node in last]

    async def close(self) -> None:
        """Close the endpoint."""
        if self._server is not None:
            await self._server.close()
        self._server = None


async def run_environment(
    make: Callable[[Mapping[str, Any]], Environment],
    timeout_s: float,
    session: Session,
    prompt: Prompt,
) -> list[str]:
    """Play an episode of the environment that is made of a prompt's row; see `_Drive`."""
    try:
        environment = make(prompt.row)
    except (Exception, SystemExit) as error:
        raise AgentFailedError(
            f"the environment was not made: {type(error).__name__}: {error}"
        ) from error
    return await run_episode(session, environment, timeout_s=timeout_s)


def _make_revision(
    config: MultiTurnConfig, reward: RewardRunner, prompt_key: str, row: Mapping[str, Any]
) -> Environment:
    prompt = row[prompt_key]
    messages: Sequence[Mapping[str, Any]] = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        messages = normalize_messages(prompt)

    async def score(completion: str) -> tuple[float, str]:
        text = str(messages[-1]["content"])
        scored = await reward.score(prompt=text, completion=completion, row=row)
        if isinstance(scored, RewardError):
            raise scored
        return scored.score, scored.feedback or ""

    return RevisionEnvironment(
        messages, score, good_enough=config.good_enough, max_revisions=config.max_revisions
    )


def _number_state(agent: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """Return a number that is equal for turns of one agent after equal messages since the turn before them."""
    said = [(message["role"], message.get("content")) for message in messages]
    digest = blake2b(repr((agent, said)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def agent_returns(session: Session) -> list[float]:
    """Return the score of each turn's agent; NaN for a turn that is not trained on, if its agent has none.

    Raises:
        EpisodeError: the agent of a turn that is trained on has no score: it would not be worth 0.
    """
    trained = choose_trained(session)
    returns: list[float] = []
    for turn in session.graph.turns():
        score = session.agent_score(turn.agent)
        if score is None and turn in trained:
            raise EpisodeError(
                f"agent {turn.agent!r} of episode {session.session_id!r} has no reward, and neither has the session"
            )
        returns.append(math.nan if score is None else score)
    return returns


def turn_returns(session: Session, *, discount: float) -> list[float]:
    """Return the return of each turn: its rewards, and the discounted mean return of the turns that continue it.

    The rewards of the session are those of the turns that nothing continues. Turns that are not trained on, such as
    those that the agent did not get, have no part in the returns of others.
    """
    trained = choose_trained(session)
    rewards: dict[str, float] = {}
    for reward in session.rewards:
        rewards[reward.response_id] = rewards.get(reward.response_id, 0.0) + reward.value
    turns = list(session.graph.turns())
    following: dict[int, list[float]] = {turn.number: [] for turn in turns}
    returns: dict[int, float] = {}
    for turn in reversed(turns):
        later = following[turn.number]
        value = rewards.get(turn.response_id, 0.0)
        if later:
            value += discount * sum(later) / len(later)
        else:
            value += rewards.get("", 0.0)
        returns[turn.number] = value
        earlier = turn.parent
        while earlier is not None and not earlier.is_turn:
            earlier = earlier.parent
        if earlier is not None and turn in trained:
            following[earlier.number].append(value)
    return [returns[turn.number] for turn in turns]
