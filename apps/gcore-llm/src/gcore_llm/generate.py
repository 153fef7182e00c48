"""From prompts to scored groups, on one controller: rewards are computed while others are still being generated."""

import asyncio
import dataclasses
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gcore_controller import StageTimer
from gcore_llm.errors import UserError
from gcore_llm.groups import Group, Response, UnfinishedGroup
from gcore_llm.prompts import Prompt
from gcore_llm.roles import Sampler, World
from gcore_rollout import Completion, Request, SamplingParams
from gcore_rollout.errors import EpisodeError
from gcore_rollout.multi_turn import run_episode
from gcore_rollout.rewards import Failed


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
        prompts: Sequence[tuple[int, Prompt]],
        *,
        begun: Sequence[tuple[UnfinishedGroup, Prompt]] = (),
        quota: int | None = None,
    ) -> Generated:
        """Complete and score each prompt ``n`` times; what is returned is in the prompts' order, those begun first.

        Args:
            prompts: with their tickets.
            begun: groups that an earlier call has left unfinished.
            quota: when so many groups are generated, the others are cut short; None: all are finished.
        """
        drafts = {group.ticket: _Draft(group.ticket, prompt, self.n, group) for group, prompt in begun}
        drafts |= {ticket: _Draft(ticket, prompt, self.n) for ticket, prompt in prompts}
        tasks: list[asyncio.Task[None]] = []
        try:
            with self.timer.stage("gen"):
                if self.sampler.world is None:
                    await self._complete(drafts, quota, tasks)
                else:
                    tasks += [asyncio.create_task(e) for e in self._episodes(self.sampler.world, drafts)]
                    await asyncio.gather(*tasks)
            with self.timer.stage("reward"):
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        whole = [d for d in drafts.values() if not d.begun and not d.num_failed]
        return Generated(
            groups=[d.group() for d in whole],
            unfinished=[d.unfinished() for d in drafts.values() if d.begun and not d.num_failed],
        )

    async def _complete(
        self, drafts: "dict[int, _Draft]", quota: int | None, scorings: list[asyncio.Task[None]]
    ) -> None:
        """Generate; the scoring of each response begins as soon as it is there."""
        requests = [self._request(draft) for draft in drafts.values()]
        requests += [self._greedy_request(draft) for draft in drafts.values() if self.with_greedy]
        num_whole, is_cut = 0, False
        async for completion in self.sampler.policy.generate(requests):
            draft = drafts[int(completion.request_id.removesuffix("/greedy"))]
            if completion.finish_reason == "abort":
                draft.begun.append(completion)
                continue
            scorings.append(asyncio.create_task(self._score(draft, completion)))
            if completion.request_id.endswith("/greedy"):
                continue
            draft.num_missing -= 1
            num_whole += draft.num_missing == 0
            if quota is not None and num_whole >= quota and not is_cut:
                is_cut = True
                await self.sampler.policy.abort([str(d.ticket) for d in drafts.values() if d.num_missing])

    def _episodes(self, world: World, drafts: "dict[int, _Draft]") -> Iterator[Coroutine[Any, Any, None]]:
        """The whole of every episode, its score included; all of them are to be played at once."""
        for draft in drafts.values():
            for index in range(self.n):
                yield self._play(world, draft, index)
            if self.with_greedy:
                yield self._play(world, draft, None)

    def _request(self, draft: "_Draft") -> Request:
        return Request(
            request_id=str(draft.ticket),
            prompt_token_ids=draft.prompt.token_ids,
            sampling=self.sampling,
            n=self.n,
            seed=hash((self.seed, draft.ticket)),
            indices=tuple(i for i in range(self.n) if i not in draft.responses),
            begun=draft.take_begun(),
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

    async def _play(self, world: World, draft: "_Draft", index: int | None) -> None:
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
        except EpisodeError:
            if world.on_error == "raise":
                raise
            draft.num_failed += 1
            return
        score, parts = episode.score, {"turns": float(len(episode.turns)), "environment": episode.score}
        if not world.has_reward:
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
            score=score,
            mask=episode.response_mask,
            parts=parts,
        )


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
