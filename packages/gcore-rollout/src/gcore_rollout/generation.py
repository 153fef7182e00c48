"""Generation of scored groups by one controller; rewards are computed while other responses are generated."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from gcore_rollout.engines.protocol import Completion, Engine, Request, SamplingParams
from gcore_rollout.errors import EpisodeError, RequestError, RewardError
from gcore_rollout.groups import Group, Prompt, Response, UnfinishedGroup
from gcore_rollout.multi_turn.config import EnvironmentRole
from gcore_rollout.multi_turn.episode import run_episode
from gcore_rollout.rewards.reward import FailureLog, Scored
from gcore_rollout.rewards.runner import Failed, GroupRewardRunner, RewardRunner

Take = Callable[[int], Awaitable[Sequence[tuple[int, Prompt]]]]
"""Returns at most so many further prompts with their prompt indices; none: there are no more."""


class Timer(Protocol):
    """Attributes the time inside a block to a stage."""

    def stage(self, name: str) -> AbstractContextManager[None]: ...


class GroupComparison(Protocol):
    """Scores the responses of a group against each other, in addition to their own scores."""

    @property
    def runner(self) -> GroupRewardRunner: ...

    async def run(self, groups: Sequence[tuple[Group, Prompt]], tokenizer: Any) -> list[Group]:
        """Return the groups with their new scores, without those whose comparison failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class RolloutRoles:
    """The services that generate and score responses."""

    policy: Engine
    reward: RewardRunner
    tokenizer: Any
    comparison: GroupComparison | None = None
    environment: EnvironmentRole | None = None
    """None: responses have one turn."""
    policy_slots: int | None = None
    """Most responses that the policy generates at once, if it is the controller's own; None: all controllers share it,
    and take no prompts from each other."""

    def failure_logs(self) -> list[FailureLog]:
        """Return the logs of reward calls and environments whose failures are dropped."""
        comparison = None if self.comparison is None else self.comparison.runner
        callers = (self.reward, comparison, self.environment)
        return [caller.failures for caller in callers if caller is not None]


@dataclass(kw_only=True, eq=False)
class Generation:
    """Generates groups of responses and scores them, in one call of `run`.

    What is drawn for a prompt depends only on its prompt index, ``seed`` and the weights.
    """

    roles: RolloutRoles
    sampling: SamplingParams
    n: int
    """Responses per prompt."""
    seed: int
    timer: Timer
    """Times the stages gen and reward."""
    with_greedy: bool = False
    """Also generate and score each prompt's greedy response."""
    compares: bool = False
    """Also score the responses of a group against each other, if there is a comparison."""
    quota: int | None = None
    """Number of generated groups after which the others are cut short; None: all are finished."""

    def __post_init__(self) -> None:
        self._pending: dict[int, _PendingGroup] = {}
        self._scoring: list[asyncio.Task[None]] = []
        self._num_generating = 0
        self._generated = asyncio.Event()

    async def run(
        self,
        prompts: Sequence[tuple[int, Prompt]] = (),
        *,
        unfinished: Sequence[tuple[UnfinishedGroup, Prompt]] = (),
        take: Take | None = None,
    ) -> tuple[list[Group], list[UnfinishedGroup]]:
        """Generate and score ``n`` responses to each prompt.

        Args:
            prompts: with their prompt indices; all are generated at once.
            unfinished: groups that an earlier call left unfinished.
            take: returns further prompts; called whenever the policy has capacity for them.

        Returns:
            The complete groups in the prompts' order, unfinished ones first, and those that were cut short; groups
            without all scores are dropped.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                with self.timer.stage("gen"):
                    continued = [_PendingGroup(g.prompt_index, prompt, self.n, g) for g, prompt in unfinished]
                    self._start([*continued, *self._new(prompts)], tasks)
                    while take and (taken := await take(await self._capacity())):
                        self._start(self._new(taken), tasks)
                        # Other controllers may not have started yet: take theirs only after some of the own work.
                        await self._fewer_than(self._num_generating)
                    await self._fewer_than(1)
                with self.timer.stage("reward"):
                    await asyncio.gather(*self._scoring)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
        else:
            return await self._finished()
        raise first

    async def _finished(self) -> tuple[list[Group], list[UnfinishedGroup]]:
        scored = [p for p in self._pending.values() if not p.num_failed]
        complete = [(p.group(), p.prompt) for p in scored if not p.partial]
        groups = [group for group, _ in complete]
        if self.compares and self.roles.comparison is not None:
            with self.timer.stage("reward"):
                groups = await self.roles.comparison.run(complete, self.roles.tokenizer)
        return groups, [p.unfinished() for p in scored if p.partial]

    def _new(self, prompts: Iterable[tuple[int, Prompt]]) -> "list[_PendingGroup]":
        return [_PendingGroup(index, prompt, self.n) for index, prompt in prompts]

    async def _capacity(self) -> int:
        """Wait until the policy can take all responses to a prompt, and return for how many prompts it can."""
        slots, per_prompt = self.roles.policy_slots, self.n + self.with_greedy
        assert slots is not None
        await self._fewer_than(max(slots - per_prompt, 0) + 1)
        return max((slots - self._num_generating) // per_prompt, 1)

    async def _fewer_than(self, count: int) -> None:
        """Wait until fewer responses are being generated."""
        while self._num_generating >= count:
            self._generated.clear()
            await self._generated.wait()

    def _end_of_response(self) -> None:
        self._num_generating -= 1
        self._generated.set()

    def _start(self, groups: "Sequence[_PendingGroup]", tasks: asyncio.TaskGroup) -> None:
        """Start to generate and score all responses to some prompts."""
        self._pending |= {group.prompt_index: group for group in groups}

        def start(num_responses: int, work: Coroutine[Any, Any, None]) -> None:
            self._num_generating += num_responses
            self._scoring.append(tasks.create_task(work))

        if self.roles.environment is None:
            requests = [self._request(group) for group in groups]
            requests += [self._greedy_request(group) for group in groups if self.with_greedy]
            if requests:
                start(sum(len(request.sample_indices) for request in requests), self._complete(requests, start))
            return
        for group in groups:
            for index in (*range(self.n), *([None] if self.with_greedy else [])):
                start(1, self._play(self.roles.environment, group, index))

    async def _complete(self, requests: list[Request], start: Callable[[int, Coroutine[Any, Any, None]], None]) -> None:
        """Generate, and start to score each response as soon as it is complete."""
        num_whole, is_cut = 0, False
        async for completion in self.roles.policy.generate(requests):
            group = self._pending[int(completion.request_id.removesuffix("/greedy"))]
            if completion.finish_reason == "abort":
                group.partial.append(completion)
                self._end_of_response()
                continue
            start(0, self._score(group, completion))
            self._end_of_response()
            if completion.request_id.endswith("/greedy"):
                continue
            group.num_missing -= 1
            num_whole += group.num_missing == 0
            if self.quota is not None and num_whole >= self.quota and not is_cut:
                is_cut = True
                await self.roles.policy.abort([str(p.prompt_index) for p in self._pending.values() if p.num_missing])

    def _request(self, group: "_PendingGroup") -> Request:
        prompt = group.prompt
        return Request(
            request_id=str(group.prompt_index),
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling,
            n=self.n,
            seed=hash((self.seed, group.prompt_index)),
            indices=tuple(i for i in range(self.n) if i not in group.responses),
            prefixes=() if group.before is None else tuple(group.before.partial),
            images=() if prompt.images is None else prompt.images.encoded(),
        )

    def _greedy_request(self, group: "_PendingGroup") -> Request:
        return Request(
            request_id=f"{group.prompt_index}/greedy",
            prompt_token_ids=group.prompt.token_ids,
            sampling=replace(self.sampling, temperature=0.0),
            images=() if group.prompt.images is None else group.prompt.images.encoded(),
        )

    async def _scored(self, group: "_PendingGroup", text: str) -> Scored | None:
        """Return the reward's score; None: it failed, and the group is dropped."""
        scored = await self.roles.reward.score(prompt=group.prompt.text, completion=text, row=group.prompt.row)
        if isinstance(scored, Failed):
            group.num_failed += 1
            return None
        return scored

    async def _score(self, group: "_PendingGroup", completion: Completion) -> None:
        scored = await self._scored(group, self.roles.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        if scored is None:
            return
        if completion.request_id.endswith("/greedy"):
            group.greedy_score = scored.score
            return
        group.responses[completion.index] = Response(
            token_ids=completion.token_ids,
            log_probs=completion.log_probs,
            weight_versions=completion.weight_versions,
            truncated=completion.finish_reason != "stop",
            score=scored.score,
            parts=scored.parts,
        )

    async def _play(self, environment: EnvironmentRole, group: "_PendingGroup", index: int | None) -> None:
        """Run one episode and score its last turn; the greedy episode has no index."""
        try:
            episode = await run_episode(
                self.roles.policy,
                environment.make(group.prompt.row),
                environment.encoder,
                request_id=f"{group.prompt_index}/{'greedy' if index is None else index}",
                sampling=self.sampling if index is not None else replace(self.sampling, temperature=0.0),
                limits=environment.limits,
                seed=hash((self.seed, group.prompt_index, index)),
            )
        except EpisodeError as error:
            if environment.on_error == "raise":
                raise
            # A failure of the run's reward during a revision is counted by the reward.
            if not isinstance(error.__cause__, RewardError):
                environment.failures.failed(error)
            group.num_failed += 1
            return
        finally:
            self._end_of_response()
        score, parts = episode.score, {"turns": float(len(episode.turns)), "environment": episode.score}
        if environment.has_reward:
            environment.failures.succeeded()
        else:
            scored = await self._scored(group, episode.turns[-1])
            if scored is None:
                return
            score, parts = score + scored.score, {**scored.parts, **parts}
        if index is None:
            group.greedy_score = score
            return
        group.start_with(episode.prompt_ids)
        group.responses[index] = Response(
            token_ids=episode.token_ids,
            log_probs=episode.log_probs,
            weight_versions=episode.weight_versions,
            truncated=episode.end != "done",
            end=episode.end,
            score=score,
            mask=episode.response_mask,
            parts=parts,
        )


@dataclass(eq=False)
class _PendingGroup:
    """A group whose responses are being generated and scored."""

    prompt_index: int
    prompt: Prompt
    n: int
    before: UnfinishedGroup | None = None
    """The group as an earlier call left it."""
    partial: list[Completion] = field(default_factory=list[Completion])
    """Responses that were cut short in this call."""
    num_failed: int = 0
    """Responses without a score."""
    greedy_score: float | None = None

    def __post_init__(self) -> None:
        self.responses: dict[int, Response] = {} if self.before is None else dict(self.before.responses)
        self.num_missing = self.n - len(self.responses)
        """Responses that are still to be generated."""
        self._prompt_ids = np.array(self.prompt.token_ids, np.int64)
        self._has_started = False

    def start_with(self, prompt_ids: Any) -> None:
        """Set the tokens that an episode starts with.

        Raises:
            RequestError: another episode of the group started with other tokens.
        """
        if self._has_started and not np.array_equal(prompt_ids, self._prompt_ids):
            raise RequestError(
                "rollout.multi_turn.environment started episodes of one row with different messages; expected the same "
                f"messages in a group, whose episodes are compared with each other (row {self.prompt.row!r:.200})"
            )
        self._has_started = True
        self._prompt_ids = prompt_ids

    def group(self) -> Group:
        return Group(
            prompt_index=self.prompt_index,
            prompt_ids=self._prompt_ids,
            responses=[self.responses[i] for i in range(self.n)],
            greedy_score=self.greedy_score,
            images=self.prompt.images,
        )

    def unfinished(self) -> UnfinishedGroup:
        return UnfinishedGroup(prompt_index=self.prompt_index, responses=self.responses, partial=self.partial)
