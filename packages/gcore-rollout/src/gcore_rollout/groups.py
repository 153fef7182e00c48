"""The scored responses to a prompt, metrics of all that were sampled, and expected lengths of later responses."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import attrgetter
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.protocol import Completion, EpisodeEnd
from gcore_rollout.errors import EpisodeError
from gcore_rollout.prompts import Prompt, PromptImages
from gcore_rollout.rewards.reward import part_means, values_by_name


@dataclass(kw_only=True, eq=False)
class Group:
    """The completions of one prompt.

    Example:
        >>> arrays = {"log_probs": np.zeros(3, np.float32), "weight_versions": np.zeros(3, np.int32)}
        >>> ids = np.array([5, 6, 1])
        >>> response = Completion(request_id="0", index=0, token_ids=ids, finish_reason="stop", **arrays)
        >>> group = Group(prompt_index=0, prompt_ids=np.array([2, 3]), responses=[response])
        >>> group.lengths
        array([3])
        >>> group.has_signal
        False
        >>> Group.from_state(group.state()).scores
        [0.0]
    """

    prompt_index: int
    """Position of the prompt in the run's global order."""
    prompt_ids: NDArray[np.int64]
    responses: list[Completion] = field(default_factory=list[Completion])
    """By index; in a group that was cut short, some have ``finish_reason`` "abort", and others may be missing."""
    greedy_score: float | None = None
    """Score of the greedy response, where the algorithm compares with it."""
    images: PromptImages | None = None
    """Images of the prompt."""
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    """The prompt's row in `Generation.columns`: lists, such as chat messages, and anything else as text."""
    running_version: int | None = None
    """The weights that its episodes started with, while some are running; None: none is to be continued."""

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that generated any token; None: there is no token yet."""
        versions = np.concatenate(
            [np.zeros(0, np.int32), *(r.sampled_versions for r in self.responses)]
        )
        if self.running_version is not None:
            versions = np.append(versions, self.running_version)
        if not versions.size:
            return None
        return int(versions.min())

    @property
    def aborted(self) -> list[Completion]:
        """The responses that were cut short, to be continued."""
        return [r for r in self.responses if r.finish_reason == "abort"]

    @property
    def scores(self) -> list[float]:
        return [r.score for r in self.responses]

    @property
    def has_images(self) -> bool:
        """True if the prompt or a response has images."""
        return any(part.images is not None for part in (self, *self.responses))

    @property
    def has_signal(self) -> bool:
        """True if the responses differ in score, or turns in credit, so that their advantages do."""
        if len(set(self.scores)) > 1:
            return True
        return any(credit is not None and credit.any() for credit in self.center_credit())

    def center_credit(
        self, moving: Mapping[tuple[int, int, str], float] | None = None
    ) -> list[NDArray[np.float32] | None]:
        """Return the credit [R] of each response, less the mean credit of each turn's agent; None: it has no credit.

        For a turn of agent a with the value V this is A = V - b(a). The baseline b(a) is the mean over the sessions in
        which a has turns, as in GRPO, of the mean over its turns of each. There is no division by a standard deviation.
        ``moving`` has other baselines, by the indices of prompt and response, and by agent.
        """
        session_means = values_by_name(response.mean_credit() for response in self.responses)
        group_means = {agent: float(np.mean(means)) for agent, means in session_means.items()}
        advantages: list[NDArray[np.float32] | None] = []
        for response in self.responses:
            credit = response.credit
            if credit is not None:
                credit = credit.copy()
                for agent, spans in response.agents.items():
                    baseline = group_means[agent]
                    if moving is not None:
                        baseline = moving[self.prompt_index, response.index, agent]
                    for start, stop in spans:
                        credit[start:stop] -= np.float32(baseline)
            advantages.append(credit)
        return advantages

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Response lengths in tokens, shape [n]."""
        return np.array([r.token_ids.size for r in self.responses])

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint; running episodes start again from their row."""
        state = {"ticket": self.prompt_index, **vars(self)}
        del state["prompt_index"], state["running_version"]
        state["responses"] = [r.state() for r in self.responses]
        state["images"] = self.images and self.images.state()
        return state

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Group":
        """Return the group that `state` gave this state for.

        Older checkpoints have the aborted responses in an entry of their own, and no prompt in such a group; their
        other responses lack the request's name and, in a complete group, their index.
        """
        fields: dict[str, Any] = {"prompt_ids": np.zeros(0, np.int64), **state}
        prompt_index: int = fields.pop("ticket")
        responses = [Completion.from_state(response) for response in fields.pop("begun", [])]
        for index, response in enumerate(fields.pop("responses")):
            responses.append(
                Completion.from_state({"request_id": str(prompt_index), "index": index, **response})
            )
        responses.sort(key=attrgetter("index"))
        images = fields.pop("images", None)
        images = images and PromptImages.from_state(images)
        if "source" in fields:
            # Of earlier versions.
            fields["columns"] = {"data_source": fields.pop("source")}
        return cls(prompt_index=prompt_index, responses=responses, images=images, **fields)


def share_prompt(group: Group, response: Completion) -> Completion:
    """Return a response to the group's prompt, whose episode may have started with another one.

    The prompt of the group becomes what all episodes start with; what differs from there on is a part of each response,
    which the policy did not write. `EpisodeError` if episodes do not even start with the same token.
    """
    prompt_ids = response.prompt_ids
    assert prompt_ids is not None
    if not group.responses:
        group.prompt_ids = prompt_ids
    size = min(prompt_ids.size, group.prompt_ids.size)
    differs = np.flatnonzero(prompt_ids[:size] != group.prompt_ids[:size])
    size = int(differs[0]) if differs.size else size
    starts = (response.images and response.images.starts) or ()
    for start in starts:
        if start < size and (prompt_ids[start:size] == prompt_ids[start]).all():
            # Episodes with images of other sizes have them in their responses, in one piece.
            size = start
    if not size:
        raise EpisodeError(
            f"episodes of prompt {group.prompt_index} start with different tokens, {group.prompt_ids[0]} and "
            f"{prompt_ids[0]}; expected the same, because their scores are compared with each other"
        )
    rest = group.prompt_ids[size:]
    if rest.size:
        group.responses = [_extend_start(earlier, rest) for earlier in group.responses]
        group.prompt_ids = group.prompt_ids[:size]
    return _extend_start(replace(response, prompt_ids=None), prompt_ids[size:])


def _extend_start(response: Completion, tokens: NDArray[np.int64]) -> Completion:
    """Return a response that starts with tokens which the policy did not write."""
    count = tokens.size
    if not count:
        return response
    mask = response.mask
    if mask is None:
        mask = np.ones(response.token_ids.shape, np.bool_)
    forks = response.forks
    if forks is not None:
        # What followed the prompt follows these tokens.
        parents = np.where(forks[:, 1] >= -1, forks[:, 1] + count, forks[:, 1])
        forks = np.stack([forks[:, 0] + count, parents], axis=1)
    credit = response.credit
    if credit is not None:
        credit = np.append(np.zeros(count, np.float32), credit)
    return replace(
        response,
        token_ids=np.append(tokens, response.token_ids),
        log_probs=np.append(np.zeros(count, np.float32), response.log_probs),
        weight_versions=np.append(np.full(count, -1, np.int32), response.weight_versions),
        mask=np.append(np.zeros(count, np.bool_), mask),
        forks=forks,
        credit=credit,
        agents={agent: spans + count for agent, spans in response.agents.items()},
    )


SampledPart = tuple[NDArray[np.float64], list[Mapping[str, float]], Counter[str]]
"""[N, 4] score, length, whether it was cut off, and prompt length of each response; parts of the scores; ends of
episodes."""


def sampled_part(groups: Sequence[Group]) -> SampledPart:
    """Return one controller's part of `sampled_metrics`."""
    rows: list[tuple[float, int, bool, int]] = []
    parts: list[Mapping[str, float]] = []
    ends = Counter[str]()
    for group in groups:
        for r in group.responses:
            rows.append((r.score, r.token_ids.size, r.is_truncated, group.prompt_ids.size))
            if r.parts:
                parts.append(r.parts)
            if r.end is not None:
                ends[r.end] += 1
    return np.array(rows, np.float64).reshape(-1, 4), parts, ends


def sampled_metrics(parts: Sequence[SampledPart]) -> dict[str, float]:
    """Return metrics of all controllers' responses, under verl's names; without responses there are none of them."""
    all_rows: list[NDArray[np.float64]] = []
    score_parts: list[Mapping[str, float]] = []
    ends = Counter[str]()
    for rows, their_parts, their_ends in parts:
        all_rows.append(rows)
        score_parts += their_parts
        ends += their_ends
    metrics: dict[str, float] = {}
    columns = np.concatenate(all_rows).T
    if columns.size:
        scores, lengths, truncated, prompts = columns
        metrics |= {
            "critic/score/mean": scores.mean(),
            "critic/score/max": scores.max(),
            "critic/score/min": scores.min(),
            "response_length/mean": lengths.mean(),
            "response_length/max": lengths.max(),
            "response_length/clip_ratio": truncated.mean(),
            "prompt_length/mean": prompts.mean(),
            "perf/total_num_tokens": lengths.sum() + prompts.sum(),
        }
    metrics |= part_means(score_parts)
    if ends:
        metrics |= {
            f"multi_turn/end/{end}": ends[end] / ends.total() for end in get_args(EpisodeEnd)
        }
    return {name: float(value) for name, value in metrics.items()}


_SOURCE_COLUMN = "data_source"
"""Column of a row that names the data set it comes from, as verl calls it."""

MeasuredLength = tuple[int, float, str]
"""64 bits of a digest of a prompt's tokens; mean tokens of its responses, each time it is sampled; its data set, empty
if its row names none."""


def measure_length(prompt: Prompt, lengths: Sequence[int]) -> MeasuredLength:
    """Measure the responses to a prompt; ``lengths`` are in tokens, of one or more."""
    return _key(prompt), sum(lengths) / len(lengths), _source(prompt)


class LengthHistory:
    """Keeps the lengths of responses by prompt, for the prompts sampled last, and their mean by data set.

    An expectation follows lengths as they change: a new measurement has a weight of a half against the earlier ones of
    its prompt, and of a hundredth against those of its data set.

    Args:
        max_prompts: how many prompts are kept, at 12 bytes each in a checkpoint.
        max_sources: how many data sets.

    Example:
        >>> prompt = Prompt(text="2 + 2 =", token_ids=(2, 13, 2), row={"data_source": "sums"})
        >>> history = LengthHistory()
        >>> history.add([measure_length(prompt, [8, 12])])
        >>> history.expected(prompt)
        10
        >>> history.expected(Prompt(text="3 + 3 =", token_ids=(3, 13, 3), row={"data_source": "sums"}))
        10
    """

    def __init__(self, *, max_prompts: int = 2**15, max_sources: int = 256) -> None:
        self._max_prompts = max_prompts
        self._max_sources = max_sources
        self._by_prompt: OrderedDict[int, float] = OrderedDict()
        self._by_source: OrderedDict[str, float] = OrderedDict()

    def expected(self, prompt: Prompt) -> int | None:
        """Return the expected length of a response in tokens; None if nothing is known of the prompt or its source."""
        mean = self._by_prompt.get(_key(prompt), self._by_source.get(_source(prompt)))
        return None if mean is None else max(1, round(mean))

    def add(self, measured: Sequence[MeasuredLength]) -> None:
        """Add measurements that were made together, in any order."""
        for key, mean, source in sorted(measured):
            _blend(self._by_prompt, key, mean, weight=0.5, max_entries=self._max_prompts)
            _blend(self._by_source, source, mean, weight=0.01, max_entries=self._max_sources)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and texts for a checkpoint."""
        return {
            "keys": np.fromiter(self._by_prompt.keys(), np.uint64, len(self._by_prompt)),
            "mean_tokens": np.fromiter(self._by_prompt.values(), np.float32, len(self._by_prompt)),
            "sources": dict(self._by_source),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._by_prompt = OrderedDict(
            zip(state["keys"].tolist(), state["mean_tokens"].tolist(), strict=True)
        )
        self._by_source = OrderedDict(state["sources"])


def _key(prompt: Prompt) -> int:
    return int.from_bytes(
        blake2b(np.array(prompt.token_ids, np.int64).tobytes(), digest_size=8).digest(), "little"
    )


def _source(prompt: Prompt) -> str:
    return str(prompt.row.get(_SOURCE_COLUMN, ""))


def _blend(
    means: "OrderedDict[Any, float]", key: Any, value: float, *, weight: float, max_entries: int
) -> None:
    """Move a mean towards a value, as the last entry; the first ones leave where there are too many."""
    before = means.pop(key, value)
    # As a checkpoint holds it, so that a resumed run continues with the same number.
    means[key] = float(np.float32(before + weight * (value - before)))
    if len(means) > max_entries:
        means.popitem(last=False)
