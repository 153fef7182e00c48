"""Generation of scored groups on one controller; rewards are computed while other responses are generated."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gcore_controller import Generated, StageTimer
from gcore_llm.data.prompts import Prompt
from gcore_llm.roles import EnvironmentRole, SamplingRoles
from gcore_llm.sampling.comparison import Comparison
from gcore_llm.sampling.groups import Group, Response, UnfinishedGroup
from gcore_rollout import Completion, EpisodeError, Failed, Request, RewardError, SamplingParams, run_episode
from gcore_runs.errors import UserError

Take = Callable[[int], Awaitable[Sequence[tuple[int, Prompt]]]]
"""Returns at most so many further prompts with their prompt indices; none: there are no more."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generates groups of responses and scores them.

    What is drawn for a prompt depends only on its prompt index, ``seed`` and the weights.
    """

    sampler: SamplingRoles
    sampling: SamplingParams
    n: int
    """Responses per prompt."""
    seed: int
    timer: StageTimer
    with_greedy: bool = False
    """Also generate and score each prompt's greedy response."""
    comparison: Comparison | None = None
    """Scores the responses of a group against each other, in addition."""

    async def run(
        self,
        prompts: Sequence[tuple[int, Prompt]] = (),
        *,
        unfinished: Sequence[tuple[UnfinishedGroup, Prompt]] = (),
        quota: int | None = None,
        take: Take | None = None,
    ) -> Generated[Group]:
        """Generate and score ``n`` responses to each prompt.

        Args:
            prompts: with their prompt indices; all are generated at once.
            unfinished: groups that an earlier call left unfinished.
            quota: when so many groups of these are generated, the others are cut short; None: all are finished.
            take: returns further prompts; called whenever the policy has capacity for them.

        Returns:
            The groups in the prompts' order, unfinished ones first; those without all scores are dropped.
        """
        pending = {
            group.prompt_index: _PendingGroup(group.prompt_index, prompt, self.n, group) for group, prompt in unfinished
        }
        pending |= {index: _PendingGroup(index, prompt, self.n) for index, prompt in prompts}
        in_flight = _InFlight()
        try:
            with self.timer.stage("gen"):
                self._start(pending, in_flight, quota)
                while take and (taken := await take(await self._capacity(in_flight))):
                    new = {index: _PendingGroup(index, prompt, self.n) for index, prompt in taken}
                    pending |= new
                    self._start(new, in_flight)
                    # Other controllers may not have started yet: take theirs only after some of the own work.
                    await in_flight.fewer_than(in_flight.num_generating)
                await in_flight.fewer_than(1)
            with self.timer.stage("reward"):
                await asyncio.gather(*in_flight.tasks)
        finally:
            in_flight.cancel()
        complete = [p for p in pending.values() if not p.partial and not p.num_failed]
        cut_short = [p for p in pending.values() if p.partial and not p.num_failed]
        groups = [p.group() for p in complete]
        if self.comparison is not None:
            pairs = [(group, p.prompt) for group, p in zip(groups, complete, strict=True)]
            with self.timer.stage("reward"):
                groups = await self.comparison.run(pairs, self.sampler.tokenizer)
        return Generated(groups=groups, unfinished=[p.unfinished() for p in cut_short])

    async def _capacity(self, in_flight: "_InFlight") -> int:
        """Wait until the policy can take all responses to a prompt, and return for how many prompts it can."""
        slots, per_prompt = self.sampler.policy_slots, self.n + self.with_greedy
        assert slots is not None
        await in_flight.fewer_than(max(slots - per_prompt, 0) + 1)
        return max((slots - in_flight.num_generating) // per_prompt, 1)

    def _start(self, pending: "dict[int, _PendingGroup]", in_flight: "_InFlight", quota: int | None = None) -> None:
        """Start to generate and score all responses to some prompts."""
        if self.sampler.environment is None:
            requests = [self._request(group) for group in pending.values()]
            requests += [self._greedy_request(group) for group in pending.values() if self.with_greedy]
            if requests:
                num_responses = sum(len(request.sample_indices) for request in requests)
                in_flight.start(num_responses, self._complete(requests, pending, quota, in_flight))
            return
        for group in pending.values():
            for index in (*range(self.n), *([None] if self.with_greedy else [])):
                in_flight.start(1, self._play(self.sampler.environment, group, index, in_flight))

    async def _complete(
        self,
        requests: list[Request],
        pending: "dict[int, _PendingGroup]",
        quota: int | None,
        in_flight: "_InFlight",
    ) -> None:
        """Generate, and start to score each response as soon as it is complete."""
        num_whole, is_cut = 0, False
        async for completion in self.sampler.policy.generate(requests):
            group = pending[int(completion.request_id.removesuffix("/greedy"))]
            if completion.finish_reason == "abort":
                group.partial.append(completion)
                in_flight.generated()
                continue
            in_flight.start(0, self._score(group, completion))
            in_flight.generated()
            if completion.request_id.endswith("/greedy"):
                continue
            group.num_missing -= 1
            num_whole += group.num_missing == 0
            if quota is not None and num_whole >= quota and not is_cut:
                is_cut = True
                await self.sampler.policy.abort([str(d.prompt_index) for d in pending.values() if d.num_missing])

    def _request(self, group: "_PendingGroup") -> Request:
        return Request(
            request_id=str(group.prompt_index),
            prompt_token_ids=group.prompt.token_ids,
            sampling=self.sampling,
            n=self.n,
            seed=hash((self.seed, group.prompt_index)),
            indices=tuple(i for i in range(self.n) if i not in group.responses),
            prefixes=group.partial_before,
            images=group.prompt.encoded_images(),
        )

    def _greedy_request(self, group: "_PendingGroup") -> Request:
        return Request(
            request_id=f"{group.prompt_index}/greedy",
            prompt_token_ids=group.prompt.token_ids,
            sampling=dataclasses.replace(self.sampling, temperature=0.0),
            images=group.prompt.encoded_images(),
        )

    async def _score(self, group: "_PendingGroup", completion: Completion) -> None:
        text: str = self.sampler.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        scored = await self.sampler.reward.score(prompt=group.prompt.text, completion=text, row=group.prompt.row)
        if isinstance(scored, Failed):
            group.num_failed += 1
        elif completion.request_id.endswith("/greedy"):
            group.greedy_score = scored.score
        else:
            group.responses[completion.index] = Response(
                token_ids=completion.token_ids,
                log_probs=completion.log_probs,
                weight_versions=completion.weight_versions,
                truncated=completion.finish_reason != "stop",
                score=scored.score,
                parts=scored.parts,
            )

    async def _play(
        self, environment: EnvironmentRole, group: "_PendingGroup", index: int | None, in_flight: "_InFlight"
    ) -> None:
        """Run one episode and score its last turn; the greedy episode has no index."""
        prompt = group.prompt
        try:
            episode = await run_episode(
                self.sampler.policy,
                environment.make(prompt.row),
                environment.encoder,
                request_id=f"{group.prompt_index}/{'greedy' if index is None else index}",
                sampling=self.sampling if index is not None else dataclasses.replace(self.sampling, temperature=0.0),
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
            in_flight.generated()
        score, parts = episode.score, {"turns": float(len(episode.turns)), "environment": episode.score}
        if environment.has_reward:
            environment.failures.succeeded()
        else:
            scored = await self.sampler.reward.score(prompt=prompt.text, completion=episode.turns[-1], row=prompt.row)
            if isinstance(scored, Failed):
                group.num_failed += 1
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


class _InFlight:
    """The responses that are being generated and scored.

    Attributes:
        tasks: All tasks that were started.
        num_generating: Number of responses that are being generated.
    """

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.num_generating = 0
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def start(self, num_responses: int, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that generates so many responses, and calls `generated` for each of them."""
        self.num_generating += num_responses
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def generated(self) -> None:
        """Note that a response is generated."""
        self.num_generating -= 1
        self._changed.set()

    async def fewer_than(self, count: int) -> None:
        """Wait until fewer responses are being generated.

        Raises:
            Exception: of the first task that failed.
        """
        while self.num_generating >= count:
            self._changed.clear()
            await self._changed.wait()
            if self._error is not None:
                raise self._error

    def cancel(self) -> None:
        """Cancel the tasks that have not ended."""
        for task in self.tasks:
            task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._changed.set()


@dataclass(eq=False)
class _PendingGroup:
    """A group whose responses are being generated and scored."""

    prompt_index: int
    prompt: Prompt
    n: int
    before: UnfinishedGroup | None = None
    """The group as an earlier call left it."""
    responses: dict[int, Response] = field(default_factory=dict[int, Response])
    partial: list[Completion] = field(default_factory=list[Completion])
    """Responses that were cut short in this call."""
    num_failed: int = 0
    """Responses without a score."""
    greedy_score: float | None = None

    def __post_init__(self) -> None:
        self.partial_before = () if self.before is None else tuple(self.before.partial)
        """Responses that were cut short earlier, to be continued."""
        if self.before is not None:
            self.responses = dict(self.before.responses)
        self.num_missing = self.n - len(self.responses)
        """Responses that are still to be generated."""
        self._prompt_ids = np.array(self.prompt.token_ids, np.int64)
        self._has_started = False

    def start_with(self, prompt_ids: Any) -> None:
        """Set the tokens that an episode starts with.

        Raises:
            UserError: another episode of the group started with other tokens.
        """
        if self._has_started and not np.array_equal(prompt_ids, self._prompt_ids):
            raise UserError(
                "rollout.multi_turn.environment started episodes of one row with different messages; expected the same "
                f"messages in a group, whose episodes are compared with each other (row {self.prompt.row!r:.200})"
            )
        self._has_started = True
        self._prompt_ids = prompt_ids

    def group(self) -> Group:
        """Return the complete group."""
        return Group(
            prompt_index=self.prompt_index,
            prompt_ids=self._prompt_ids,
            responses=[self.responses[i] for i in range(self.n)],
            greedy_score=self.greedy_score,
            images=self.prompt.images,
        )

    def unfinished(self) -> UnfinishedGroup:
        """Return the group to be continued later."""
        return UnfinishedGroup(prompt_index=self.prompt_index, responses=self.responses, partial=self.partial)
