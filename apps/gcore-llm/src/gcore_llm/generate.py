"""From prompts to scored groups, on one controller: rewards are computed while others are still being generated."""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gcore_controller import StageTimer
from gcore_llm.groups import Group, Response, UnfinishedGroup
from gcore_llm.prompts import Prompt
from gcore_llm.roles import Sampler, World
from gcore_rollout import Completion, EpisodeError, Failed, Request, RewardError, SamplingParams, run_episode
from gcore_runs.errors import UserError

Take = Callable[[int], Awaitable[Sequence[tuple[int, Prompt]]]]
"""The next prompts with their tickets, at most so many; none: there are no more."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What became of some prompts; of those in neither list the reward had no score to give, or failed and may."""

    groups: list[Group]
    unfinished: list[UnfinishedGroup]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How groups are generated.

    What is drawn for a ticket depends on the ticket, ``seed`` and the weights alone.
    """

    sampler: Sampler
    sampling: SamplingParams
    n: int
    """Responses a prompt."""
    seed: int
    timer: StageTimer
    with_greedy: bool = False
    """Make and score each prompt's greedy response beside the others."""

    async def run(
        self,
        prompts: Sequence[tuple[int, Prompt]] = (),
        *,
        begun: Sequence[tuple[UnfinishedGroup, Prompt]] = (),
        quota: int | None = None,
        take: Take | None = None,
    ) -> Generated:
        """Complete and score each prompt ``n`` times; what is returned is in the prompts' order, those begun first.

        Args:
            prompts: with their tickets; all are generated at once.
            begun: groups that an earlier call has left unfinished.
            quota: when so many groups of these are generated, the others are cut short; None: all are finished.
            take: gives further prompts, for which it is asked when the policy has room for them.
        """
        drafts = {group.ticket: _Draft(group.ticket, prompt, self.n, group) for group, prompt in begun}
        drafts |= {ticket: _Draft(ticket, prompt, self.n) for ticket, prompt in prompts}
        under_way = _UnderWay()
        try:
            with self.timer.stage("gen"):
                self._begin(drafts, under_way, quota)
                while take and (taken := await take(await self._room(under_way))):
                    new = {ticket: _Draft(ticket, prompt, self.n) for ticket, prompt in taken}
                    drafts |= new
                    self._begin(new, under_way)
                    # Others may be about to begin: only who has done some of its work takes theirs.
                    await under_way.fewer_than(under_way.num_generating)
                await under_way.fewer_than(1)
            with self.timer.stage("reward"):
                await asyncio.gather(*under_way.tasks)
        finally:
            under_way.cancel()
        whole = [d for d in drafts.values() if not d.begun and not d.num_failed]
        return Generated(
            groups=[d.group() for d in whole],
            unfinished=[d.unfinished() for d in drafts.values() if d.begun and not d.num_failed],
        )

    async def _room(self, under_way: "_UnderWay") -> int:
        """Wait until the policy has room for all responses to a prompt; for how many prompts it has."""
        slots, per_prompt = self.sampler.policy_slots, self.n + self.with_greedy
        assert slots is not None
        await under_way.fewer_than(max(slots - per_prompt, 0) + 1)
        return max((slots - under_way.num_generating) // per_prompt, 1)

    def _begin(self, drafts: "dict[int, _Draft]", under_way: "_UnderWay", quota: int | None = None) -> None:
        """Have all responses to some prompts generated and scored."""
        if self.sampler.world is None:
            requests = [self._request(draft) for draft in drafts.values()]
            requests += [self._greedy_request(draft) for draft in drafts.values() if self.with_greedy]
            if requests:
                num_responses = sum(len(request.sample_indices) for request in requests)
                under_way.begin(num_responses, self._complete(requests, drafts, quota, under_way))
            return
        for draft in drafts.values():
            for index in (*range(self.n), *([None] if self.with_greedy else [])):
                under_way.begin(1, self._play(self.sampler.world, draft, index, under_way))

    async def _complete(
        self, requests: list[Request], drafts: "dict[int, _Draft]", quota: int | None, under_way: "_UnderWay"
    ) -> None:
        """Generate; the scoring of each response begins as soon as it is there."""
        num_whole, is_cut = 0, False
        async for completion in self.sampler.policy.generate(requests):
            draft = drafts[int(completion.request_id.removesuffix("/greedy"))]
            if completion.finish_reason == "abort":
                draft.begun.append(completion)
                under_way.generated()
                continue
            under_way.begin(0, self._score(draft, completion))
            under_way.generated()
            if completion.request_id.endswith("/greedy"):
                continue
            draft.num_missing -= 1
            num_whole += draft.num_missing == 0
            if quota is not None and num_whole >= quota and not is_cut:
                is_cut = True
                await self.sampler.policy.abort([str(d.ticket) for d in drafts.values() if d.num_missing])

    def _request(self, draft: "_Draft") -> Request:
        return Request(
            request_id=str(draft.ticket),
            prompt_token_ids=draft.prompt.token_ids,
            sampling=self.sampling,
            n=self.n,
            seed=hash((self.seed, draft.ticket)),
            indices=tuple(i for i in range(self.n) if i not in draft.responses),
            prefixes=draft.take_begun(),
            images=draft.prompt.encoded_images(),
        )

    def _greedy_request(self, draft: "_Draft") -> Request:
        return Request(
            request_id=f"{draft.ticket}/greedy",
            prompt_token_ids=draft.prompt.token_ids,
            sampling=dataclasses.replace(self.sampling, temperature=0.0),
            images=draft.prompt.encoded_images(),
        )

    async def _score(self, draft: "_Draft", completion: Completion) -> None:
        text: str = self.sampler.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        scored = await self.sampler.reward.score(prompt=draft.prompt.text, completion=text, row=draft.prompt.row)
        if isinstance(scored, Failed):
            draft.num_failed += 1
        elif completion.request_id.endswith("/greedy"):
            draft.greedy_score = scored.score
        else:
            draft.responses[completion.index] = Response(
                token_ids=completion.token_ids,
                log_probs=completion.log_probs,
                weight_versions=completion.weight_versions,
                truncated=completion.finish_reason != "stop",
                score=scored.score,
                parts=scored.parts,
            )

    async def _play(self, world: World, draft: "_Draft", index: int | None, under_way: "_UnderWay") -> None:
        """One episode, and the score of its last turn; without an index the greedy one."""
        prompt = draft.prompt
        try:
            episode = await run_episode(
                self.sampler.policy,
                world.make(prompt.row),
                world.encoder,
                request_id=f"{draft.ticket}/{'greedy' if index is None else index}",
                sampling=self.sampling if index is not None else dataclasses.replace(self.sampling, temperature=0.0),
                limits=world.limits,
                seed=hash((self.seed, draft.ticket, index)),
            )
        except EpisodeError as error:
            if world.on_error == "raise":
                raise
            # A failure of the run's reward, inside of a revision, is counted there.
            if not isinstance(error.__cause__, RewardError):
                world.failures.failed(error)
            draft.num_failed += 1
            return
        finally:
            under_way.generated()
        score, parts = episode.score, {"turns": float(len(episode.turns)), "environment": episode.score}
        if world.has_reward:
            world.failures.succeeded()
        else:
            scored = await self.sampler.reward.score(prompt=prompt.text, completion=episode.turns[-1], row=prompt.row)
            if isinstance(scored, Failed):
                draft.num_failed += 1
                return
            score, parts = score + scored.score, {**scored.parts, **parts}
        if index is None:
            draft.greedy_score = score
            return
        draft.start_with(episode.prompt_ids)
        draft.responses[index] = Response(
            token_ids=episode.token_ids,
            log_probs=episode.log_probs,
            weight_versions=episode.weight_versions,
            truncated=episode.end != "done",
            end=episode.end,
            score=score,
            mask=episode.response_mask,
            parts=parts,
        )


class _UnderWay:
    """What is being generated and scored.

    Attributes:
        tasks: All that were begun.
        num_generating: Responses.
    """

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[None]] = []
        self.num_generating = 0
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def begin(self, num_responses: int, work: Coroutine[Any, Any, None]) -> None:
        """Start what generates so many responses, and calls `generated` for each of them."""
        self.num_generating += num_responses
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        self.tasks.append(task)

    def generated(self) -> None:
        """One response more."""
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
        """End what has not ended."""
        for task in self.tasks:
            task.cancel()

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self._changed.set()


@dataclass(eq=False)
class _Draft:
    """A group in the making."""

    ticket: int
    prompt: Prompt
    n: int
    before: UnfinishedGroup | None = None
    responses: dict[int, Response] = field(default_factory=dict[int, Response])
    begun: list[Completion] = field(default_factory=list[Completion])
    """Samples that were cut short."""
    num_failed: int = 0
    """Responses without a score."""
    greedy_score: float | None = None

    def __post_init__(self) -> None:
        if self.before is not None:
            self.responses = dict(self.before.responses)
        self.num_missing = self.n - len(self.responses)
        """Samples that are still to be generated."""
        self._prompt_ids = np.array(self.prompt.token_ids, np.int64)
        self._has_started = False

    def take_begun(self) -> tuple[Completion, ...]:
        """The samples to go on with."""
        return () if self.before is None else tuple(self.before.begun)

    def start_with(self, prompt_ids: Any) -> None:
        """Note the tokens that an episode began with.

        Raises:
            UserError: another one of the group began with others.
        """
        if self._has_started and not np.array_equal(prompt_ids, self._prompt_ids):
            raise UserError(
                f"rollout.multi_turn.environment began episodes of one row with different messages: those of a group "
                f"are compared with each other, so they have to begin alike (row {self.prompt.row!r:.200})"
            )
        self._has_started = True
        self._prompt_ids = prompt_ids

    def group(self) -> Group:
        return Group(
            ticket=self.ticket,
            prompt_ids=self._prompt_ids,
            responses=[self.responses[i] for i in range(self.n)],
            greedy_score=self.greedy_score,
            images=self.prompt.images,
        )

    def unfinished(self) -> UnfinishedGroup:
        return UnfinishedGroup(ticket=self.ticket, responses=self.responses, begun=self.begun)
