"""Groups of responses and their generation by one controller; rewards are computed while others are generated."""

import asyncio
from bisect import insort
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from gcore_rollout.engines.protocol import Completion, Engine, Request, SamplingParams
from gcore_rollout.episodes import EpisodeRole, RunningEpisodes
from gcore_rollout.errors import EpisodeError, RewardError
from gcore_rollout.groups import (
    Group,
    LengthHistory,
    MeasuredLength,
    measure_length,
    share_prompt,
)
from gcore_rollout.prompts import Prompt
from gcore_rollout.rewards.comparison import GroupComparison
from gcore_rollout.rewards.reward import FailureLog, Scored
from gcore_rollout.rewards.runner import RewardRunner
from gcore_rollout.rewards.steps import credit_steps

_INDEX = attrgetter("index")
"""Returns the index of a response, by which a group keeps them sorted."""

Take = Callable[[int], Awaitable[Sequence[tuple[int, Prompt]]]]
"""Returns at most so many further prompts with their prompt indices; none: there are no more."""


@dataclass(frozen=True, kw_only=True)
class RolloutRoles:
    """The services that generate and score responses.

    Example:
        >>> from transformers import AutoTokenizer
        >>> reward = RewardRunner(lambda prompt, completion, row: float("7" in completion))
        >>> engine = HFEngine.from_pretrained("model")
        >>> roles = RolloutRoles(policy=engine, reward=reward, tokenizer=AutoTokenizer.from_pretrained("model"))
        >>> [log.drain() for log in roles.failure_logs()]
        [(0, [])]
        >>> asyncio.run(engine.close())
    """

    policy: Engine
    reward: RewardRunner
    tokenizer: Any
    comparison: GroupComparison | None = None
    episodes: EpisodeRole | None = None
    """None: responses have one turn."""
    policy_slots: int | None = None
    """Most responses that the policy generates at once, if it is the controller's own; None: all controllers share it,
    and take no prompts from each other."""

    def failure_logs(self) -> list[FailureLog]:
        """Return the logs of reward calls and episodes whose failures are dropped."""
        logs = [self.reward.failures]
        if self.comparison is not None:
            logs.append(self.comparison.runner.failures)
        if self.episodes is not None:
            logs.append(self.episodes.failures)
        return logs


@dataclass(kw_only=True, eq=False)
class Generation:
    """Generates groups of responses and scores them, in one call of `run`.

    What is drawn for a prompt depends only on its prompt index, ``seed`` and the weights.

    Example:
        >>> from contextlib import nullcontext
        >>> from transformers import AutoTokenizer
        >>> async def count_characters(prompt, completion, row):
        ...     return float(len(completion))
        >>> async def main():
        ...     engine = HFEngine.from_pretrained("model")
        ...     tokenizer = AutoTokenizer.from_pretrained("model")
        ...     roles = RolloutRoles(policy=engine, reward=RewardRunner(count_characters), tokenizer=tokenizer)
        ...     sampling = SamplingParams(max_tokens=4)
        ...     generation = Generation(roles=roles, sampling=sampling, n=2, seed=0, time_stage=nullcontext)
        ...     prompt = Prompt(text="Hi", token_ids=tuple(tokenizer("Hi")["input_ids"]), row={})
        ...     groups, _ = await generation.run([(0, prompt), (1, prompt)])
        ...     await engine.close()
        ...     return groups
        >>> [(group.prompt_index, len(group.scores)) for group in asyncio.run(main())]
        [(0, 2), (1, 2)]
    """

    roles: RolloutRoles
    sampling: SamplingParams
    n: int
    """Responses per prompt."""
    seed: int
    time_stage: Callable[[str], AbstractContextManager[Any]]
    """Returns the context in which time is attributed to a stage, gen or reward."""
    with_greedy: bool = False
    """Also generate and score each prompt's greedy response."""
    compares: bool = False
    """Also score the responses of a group against each other, if there is a comparison."""
    quota: int | None = None
    """Number of generated groups after which the others are cut short; None: all are finished."""
    may_stop: Callable[[Sequence[int]], bool] | None = None
    """With a quota: returns whether groups that started with these weight versions may be cut short; None: any may."""
    slots: int | None = None
    """Most responses of this controller at once, where prompts are taken; None: `RolloutRoles.policy_slots`."""
    running: RunningEpisodes | None = None
    """Keeps the episodes that a quota has cut short, for the next call; None: they end with this one."""
    finished: Callable[[Group], object] | None = None
    """Called with each group, before any comparison, as soon as all its responses are scored."""

    columns: Sequence[str] = ()
    """Columns of a row that its group keeps, where the row has them."""
    credits_steps: bool = False
    """The scores of a response's steps, if the reward gives any, are the credit of turns."""
    defers: bool = False
    """Cut a group short when a response reaches ``max_tokens``, and leave it out; its prompt index is in `deferred`."""
    history: LengthHistory | None = None
    """Lengths of earlier responses: prompts whose responses are expected to be longest start first, and engines divide
    work by expected lengths. Not with a quota, where the order decides which groups are complete."""

    def __post_init__(self) -> None:
        self._pending: dict[int, _PendingGroup] = {}
        self._scoring: list[asyncio.Task[None]] = []
        self._num_generating = 0
        self._num_complete = 0
        self._generated = asyncio.Event()
        self._episodes = self.running or RunningEpisodes(self.roles.policy)
        self._greedy = replace(self.sampling, temperature=0.0)
        self.measured: list[MeasuredLength] = []
        self.deferred: list[int] = []

    async def run(
        self,
        prompts: Sequence[tuple[int, Prompt]] = (),
        *,
        unfinished: Sequence[tuple[Group, Prompt]] = (),
        take: Take | None = None,
    ) -> tuple[list[Group], list[Group]]:
        """Generate and score ``n`` responses to each prompt.

        The lengths of the responses are in `measured` afterwards.

        Args:
            prompts: with their prompt indices; all are generated at once.
            unfinished: groups that an earlier call left unfinished.
            take: returns further prompts; called whenever the policy has capacity for them.

        Returns:
            The complete groups in the prompts' order, unfinished ones first, and those that were cut short; groups
            without all scores are dropped.
        """
        groups = [group for group, _ in unfinished]
        if self.quota == 0 and self._may_stop(group.oldest_version for group in groups):
            return [], groups
        self._enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._episodes.resume()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                with self.time_stage("gen"):
                    continued = [self._continue(group, prompt) for group, prompt in unfinished]
                    self._start(continued + self._pending_groups(prompts))
                    while take is not None and not self._enough.done():
                        capacity = await self._capacity()
                        further = () if self._enough.done() else await take(capacity)
                        if not further and (self.quota is None or not self._num_generating):
                            break
                        self._start(self._pending_groups(further))
                        # Other controllers may not have started yet: take theirs only after some of the own work.
                        await self._fewer_than(max(self._num_generating, 1))
                    await self._fewer_than(1)
                    await self._episodes.pause()
                with self.time_stage("reward"):
                    await asyncio.gather(*self._scoring)
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]
            raise first from first.__cause__
        finally:
            if self.running is None:
                await self._episodes.close()
        self.deferred = []
        self.measured = []
        complete: list[tuple[Group, Prompt]] = []
        cut_short: list[Group] = []
        for index, pending in self._pending.items():
            group = pending.group
            if pending.is_deferred:
                self.deferred.append(index)
            elif pending.num_failed:
                self._episodes.cancel(f"{index}/")
            elif pending.missing:
                cut_short.append(group)
            else:
                group.running_version = None
                self.measured.append(measure_length(pending.prompt, group.lengths.tolist()))
                complete.append((group, pending.prompt))
        groups = [group for group, _ in complete]
        if self.compares and self.roles.comparison is not None:
            with self.time_stage("reward"):
                groups = await self.roles.comparison.run(complete, self.roles.tokenizer)
        return groups, cut_short

    async def _capacity(self) -> int:
        """Wait until the policy can take all responses to a prompt, and return for how many prompts it can."""
        slots = self.slots or self.roles.policy_slots
        assert slots is not None
        per_prompt = self.n + self.with_greedy
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

    def _launch(self, num_responses: int, work: Coroutine[Any, Any, None]) -> None:
        self._num_generating += num_responses
        self._scoring.append(self._tasks.create_task(work))

    def _pending_groups(self, prompts: Sequence[tuple[int, Prompt]]) -> list["_PendingGroup"]:
        return [self._pending_group(index, prompt) for index, prompt in prompts]

    def _continue(self, before: Group, prompt: Prompt) -> "_PendingGroup":
        """Return a group that another call has left unfinished, with the responses that are complete."""
        pending = self._pending_group(before.prompt_index, prompt)
        if before.oldest_version is not None:
            pending.version = before.oldest_version
        pending.group.running_version = before.running_version
        if before.prompt_ids.size:
            # That of episodes differs from the row's.
            pending.group.prompt_ids = before.prompt_ids
        for response in before.responses:
            if response.finish_reason == "abort":
                pending.prefixes.append(response)
            else:
                pending.group.responses.append(response)
                pending.missing.remove(response.index)
        return pending

    def _pending_group(self, prompt_index: int, prompt: Prompt) -> "_PendingGroup":
        prompt_ids = np.array(prompt.token_ids, np.int64)
        group = Group(prompt_index=prompt_index, prompt_ids=prompt_ids, images=prompt.images)
        for name in self.columns:
            value = prompt.row.get(name)
            if value is not None:
                group.columns[name] = value if isinstance(value, list) else str(value)
        return _PendingGroup(
            group,
            prompt,
            missing=list(range(self.n)),
            prefixes=[],
            version=self.roles.policy.weight_version,
        )

    def _start(self, groups: list["_PendingGroup"]) -> None:
        """Start to generate and score all missing responses to some prompts."""
        for group in groups:
            self._pending[group.prompt_index] = group
        if self._enough.done():
            return
        if self.history is not None and self.quota is None:
            for group in groups:
                group.expected_tokens = self.history.expected(group.prompt)
            # Those of which nothing is known are as long as any could be.
            max_tokens = self.sampling.max_tokens
            groups.sort(key=lambda group: -(group.expected_tokens or max_tokens))
        if self.roles.episodes is not None:
            for group in groups:
                if group.group.running_version is None:
                    group.group.running_version = self.roles.policy.weight_version
                for index in group.missing:
                    self._launch(1, self._play(self.roles.episodes, group, index))
                if self.with_greedy:
                    self._launch(1, self._play(self.roles.episodes, group, None))
            return
        requests = [self._request(group) for group in groups]
        if self.with_greedy:
            requests += [self._greedy_request(request) for request in requests]
            requests.sort(key=lambda request: -request.work_per_sample)
        if requests:
            self._launch(
                sum(len(request.sample_indices) for request in requests), self._complete(requests)
            )

    def _greedy_request(self, request: Request) -> Request:
        return replace(
            request,
            request_id=f"{request.request_id}/greedy",
            sampling=self._greedy,
            n=1,
            seed=0,
            indices=None,
            prefixes=(),
        )

    def _request(self, group: "_PendingGroup") -> Request:
        prompt = group.prompt
        return Request(
            request_id=str(group.prompt_index),
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling,
            n=self.n,
            seed=hash((self.seed, group.prompt_index)),
            indices=tuple(group.missing),
            prefixes=tuple(group.prefixes),
            expected_tokens=group.expected_tokens,
            images=() if prompt.images is None else prompt.images.encoded(),
        )

    async def _complete(self, requests: list[Request]) -> None:
        """Generate, and start to score each response as soon as it is complete."""
        async for completion in self.roles.policy.generate(requests):
            group = self._pending[int(completion.request_id.removesuffix("/greedy"))]
            if self.defers and completion.finish_reason == "length" and not group.is_deferred:
                group.is_deferred = True
                await self.roles.policy.abort(
                    [str(group.prompt_index), f"{group.prompt_index}/greedy"]
                )
            if group.is_deferred:
                self._end_of_response()
                continue
            if completion.finish_reason == "abort":
                insort(group.group.responses, completion, key=_INDEX)
                self._end_of_response()
                continue
            self._launch(0, self._score(group, completion))
            self._end_of_response()
            if completion.request_id.endswith("/greedy"):
                continue
            if self._is_last(group, completion.index):
                await self.roles.policy.abort(
                    [str(p.prompt_index) for p in self._pending.values() if p.missing]
                )

    def _is_last(self, group: "_PendingGroup", index: int) -> bool:
        """Count a generated response, and return whether the quota is reached with it."""
        group.missing.remove(index)
        self._num_complete += not (group.missing or group.num_failed)
        if self.quota is None or self._num_complete < self.quota or self._enough.done():
            return False
        pending = [entry for entry in self._pending.values() if entry.missing]
        if not self._may_stop(entry.version for entry in pending if not entry.num_failed):
            return False
        self._enough.set_result(None)
        return True

    def _may_stop(self, versions: Iterable[int | None]) -> bool:
        if self.may_stop is None:
            return True
        return self.may_stop([version for version in versions if version is not None])

    async def _reward_text(self, group: "_PendingGroup", text: str) -> Scored | None:
        """Return the reward's score; None: it failed, and the group is dropped."""
        scored = await self.roles.reward.score(
            prompt=group.prompt.text, completion=text, row=group.prompt.row
        )
        if isinstance(scored, RewardError):
            group.num_failed += 1
            return None
        return scored

    async def _score(self, group: "_PendingGroup", completion: Completion) -> None:
        text = self.roles.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True)
        scored = await self._reward_text(group, text)
        if scored is None:
            return
        if self.credits_steps and scored.steps:
            completion = credit_steps(completion, scored.steps, self.roles.tokenizer)
        self._add(group, completion, scored)

    def _add(self, pending: "_PendingGroup", response: Completion, scored: Scored) -> None:
        pending.add(response, scored, is_greedy=response.request_id.endswith("/greedy"))
        if (
            self.finished is not None
            and len(pending.group.responses) == self.n
            and not pending.group.aborted
        ):
            self.finished(pending.group)

    async def _play(self, role: EpisodeRole, group: "_PendingGroup", index: int | None) -> None:
        """Run one episode and score its last turn; the greedy episode has no index."""
        try:
            episode = await self._finish_episode(role, group, index)
        except EpisodeError as error:
            self._count_failure(role, group, error)
            return
        finally:
            self._end_of_response()
        if episode is None:
            return
        if index is not None:
            self._is_last(group, index)
        if role.is_scored:
            # The run's reward has scored the turns.
            role.failures.succeeded()
            scored = Scored(score=episode.score, parts=episode.parts)
        else:
            last = await self._reward_text(group, episode.turns[-1])
            if last is None:
                return
            parts = {**last.parts, **episode.parts}
            scored = replace(last, score=episode.score + last.score, parts=parts)
        try:
            self._add(group, replace(episode, index=index or 0), scored)
        except EpisodeError as error:
            self._count_failure(role, group, error)

    async def _finish_episode(
        self, role: EpisodeRole, group: "_PendingGroup", index: int | None
    ) -> Completion | None:
        """Return an episode; None: it is still running when there are enough groups, or its group is deferred."""
        name = str(index)
        sampling = self.sampling
        seed_index = index
        if index is None:
            name = "greedy"
            sampling = self._greedy
            # The hash of None differs between processes.
            seed_index = self.n
        request_id = f"{group.prompt_index}/{name}"
        seed = hash((self.seed, group.prompt_index, seed_index))
        policy: Any = self._episodes
        play = partial(role.play, policy, group.prompt, request_id, sampling, seed)
        task = self._episodes.start(request_id, play)
        await asyncio.wait([task, self._enough], return_when=asyncio.FIRST_COMPLETED)
        if task.cancelled() or not task.done():
            return None
        self._episodes.forget(request_id)
        episode = task.result()
        if self.defers and (
            episode.end == "length" or episode.token_ids.size >= sampling.max_tokens
        ):
            group.is_deferred = True
            self._episodes.cancel(f"{group.prompt_index}/")
        return None if group.is_deferred else episode

    def _count_failure(
        self, role: EpisodeRole, group: "_PendingGroup", error: EpisodeError
    ) -> None:
        """Count an episode that failed, whose group is dropped; the error is raised if it ends the run."""
        if role.on_error == "raise":
            raise error
        # A failure of the run's reward during a revision is counted by the reward.
        if not isinstance(error.__cause__, RewardError):
            role.failures.failed(error)
        group.num_failed += 1


@dataclass(eq=False)
class _PendingGroup:
    """A group whose responses are being generated and scored."""

    group: Group
    prompt: Prompt
    missing: list[int]
    """Indices of responses that are still to be generated."""
    prefixes: list[Completion]
    """Responses that an earlier call has cut short."""
    version: int
    """The version of the weights that it started with."""
    expected_tokens: int | None = None
    num_failed: int = 0
    """Responses without a score."""
    is_deferred: bool = False

    @property
    def prompt_index(self) -> int:
        return self.group.prompt_index

    def add(self, response: Completion, scored: Scored, *, is_greedy: bool) -> None:
        """Add a scored response, or only its score if it is greedy."""
        if is_greedy:
            self.group.greedy_score = scored.score
            return
        # Nothing reads the texts of an episode's turns any more.
        response = replace(
            response,
            turns=(),
            score=scored.score,
            parts=scored.parts,
            answer=scored.answer,
            feedback=scored.feedback,
        )
        if response.prompt_ids is not None:
            response = share_prompt(self.group, response)
        insort(self.group.responses, response, key=_INDEX)
