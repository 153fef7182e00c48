"""Samples of language models, from an engine's answer to the loss, and their micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_trainer.errors import BatchError

LARGEST = np.finfo(np.float32).max
_PER_TOKEN = (
    "response_mask",
    "environment_mask",
    "advantages",
    "old_log_probs",
    "rollout_log_probs",
    "ref_log_probs",
    "rollout_is_weights",
    "values",
    "returns",
    "sharp_log_probs",
    "kept_counts",
)


def require_finite(field: str, values: NDArray[Any], mask: NDArray[np.bool_] | None = None) -> None:
    """Raise `BatchError` for NaN, infinities and what float32 cannot hold, at entries that count (None: at all)."""
    # A comparison with NaN is False.
    is_bad = ~(np.abs(values) <= LARGEST)
    if mask is not None:
        is_bad &= mask
    if is_bad.any():
        first = np.argwhere(is_bad)[0].tolist()
        index = "".join(f"[{i}]" for i in first)
        raise BatchError(
            f"{field}{index} is {values[tuple(first)]}; expected a finite float32 at every entry that counts "
            f"({int(is_bad.sum())} of {is_bad.size} are not)"
        )


def cut_at_forks(size: int, forks: NDArray[np.int64] | None) -> list[tuple[int, int, int]]:
    """Cut a response into spans of tokens that follow each other, so that others follow the last token of one only.

    Args:
        size: tokens of the response.
        forks: see `Sample.forks`.

    Returns:
        The start and stop of each span, and the token that its first one follows: the last of an earlier span, -1 (the
        prompt's last) or -2 (none).

    Example:
        >>> cut_at_forks(6, np.array([[4, 1]]))
        [(0, 2, -1), (2, 4, 1), (4, 6, 1)]
    """
    parents: dict[int, int] = {}
    if forks is not None:
        parents.update(forks.tolist())
    bounds = {0, size, *parents}
    bounds.update(parent + 1 for parent in parents.values() if parent >= 0)
    return [
        (start, stop, parents.get(start, start - 1)) for start, stop in pairwise(sorted(bounds))
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """Images of a sequence, concatenated: the patches, or square tiles, that transformers' image processors cut.

    Example:
        >>> images = Images(pixel_values=np.zeros((16, 1176), np.float32), grid_thw=np.array([[1, 4, 4]]))
        >>> images.pixel_values.shape
        (16, 1176)
    """

    pixel_values: NDArray[np.float32]
    """[patches, features]."""
    grid_thw: NDArray[np.int64]
    """[images, 3] patches of each image in time, height and width; of tiles: their number, 1 and 1."""
    starts: NDArray[np.int64] | None = None
    """[images] where each image starts in prompt and response, ascending; other image tokens are text. None: images are
    the runs of image tokens in the prompt."""

    def __post_init__(self) -> None:
        if self.grid_thw.ndim != 2 or self.grid_thw.shape[1] != 3 or not self.grid_thw.size:
            raise BatchError(
                f"grid_thw has shape {self.grid_thw.shape}; expected (images, 3) and at least one image"
            )
        num_patches = int(self.grid_thw.prod(1).sum())
        if self.pixel_values.ndim != 2 or self.pixel_values.shape[0] != num_patches:
            raise BatchError(
                f"pixel_values has shape {self.pixel_values.shape}; expected "
                f"({num_patches}, features), the number of patches in grid_thw"
            )
        require_finite("pixel_values", self.pixel_values)
        if self.starts is not None and (
            self.starts.shape != self.grid_thw.shape[:1] or (np.diff(self.starts) <= 0).any()
        ):
            raise BatchError(
                f"starts is {self.starts.tolist()}; expected {len(self.grid_thw)} ascending numbers, one for each image"
            )

    def count_before(self, num_tokens: int) -> int:
        """Return how many images start among the first tokens of the sequence, those of its prompt."""
        if self.starts is None:
            return len(self.grid_thw)
        return int(np.searchsorted(self.starts, num_tokens))

    @cached_property
    def patches(self) -> list[NDArray[np.float32]]:
        """[patches, features] of each image."""
        return np.split(self.pixel_values, self.grid_thw.prod(1).cumsum()[:-1])

    @cached_property
    def digests(self) -> list[bytes]:
        """For each image, equal for equal ones."""
        pairs = zip(self.grid_thw, self.patches, strict=True)
        return [blake2b(grid.tobytes() + p.tobytes(), digest_size=16).digest() for grid, p in pairs]


@dataclass(kw_only=True, eq=False)
class Sample:
    """One prompt and one response. Every per-token array has shape [R], R the response's length.

    It is made of an engine's answer and goes as one object to the loss: scores of models and advantages are set on the
    way. Entries of masked-out tokens are never read: they may be NaN or infinite. Samples of one micro-batch with equal
    prompts, and equal images in them, share the prompt's forward and backward pass.

    Example:
        >>> sample = Sample(prompt_ids=np.array([1, 5, 7]), response_ids=np.array([8, 9, 2]))
        >>> sample.mask
        array([ True,  True,  True])
    """

    prompt_ids: NDArray[np.int64]
    """[P], P >= 1; an image token stands once for each feature of an image."""
    response_ids: NDArray[np.int64]
    """[R], R >= 1."""
    response_mask: NDArray[np.bool_] | None = None
    """True for tokens that the policy wrote, False for tokens of the environment; None: the policy wrote all."""
    environment_mask: NDArray[np.bool_] | None = None
    """True for tokens of the environment that the policy may learn to predict (`losses.echo`); None: it learns none."""
    advantages: NDArray[np.float32] | None = None
    old_log_probs: NDArray[np.float32] | None = None
    """Under the policy before the step's first update; None: this is the first update, the ratio starts at 1."""
    rollout_log_probs: NDArray[np.float32] | None = None
    """Returned by the generation engine; compared with the trainer's own in the metrics."""
    ref_log_probs: NDArray[np.float32] | None = None
    """Under the reference policy; needed for a KL term."""
    rollout_is_weights: NDArray[np.float32] | None = None
    """Weight of each token's policy loss: importance sampling against the policy that generated it. None: 1."""
    values: NDArray[np.float32] | None = None
    """Under the critic before the step's first update; needed to train it."""
    returns: NDArray[np.float32] | None = None
    """Targets of the critic."""
    sharp_log_probs: NDArray[np.float32] | None = None
    """As ``old_log_probs``, at half the temperature."""
    kept_counts: NDArray[np.int32] | None = None
    """Number of tokens among which top-k and top-p let the engine draw each token; 0: all. None: all, everywhere.

    All log-probabilities and entropies of the sample are of the softmax over these tokens alone, after the temperature,
    under every model, as the action must be possible for all of them ("Keep Sampling Mask", DeepSeek-V3.2, arXiv
    2512.02556, section 3.1)."""
    kept_ids: NDArray[np.int32] | None = None
    """[sum of kept_counts] these tokens, those of the first response token first; the token itself is one of them."""
    routed_experts: NDArray[np.int16] | None = None
    """[num_inputs, L, K] the K experts of the policy that every input token passes through in each of L layers, in the
    order of prompt and response (see `router_replay`): 2 bytes each, 768 bytes a token with 8 experts in 48 layers.
    -1: the layer's router chooses; None: all do."""
    images: Images | None = None
    """Images of prompt and response, in the order of their places; None: there are none."""
    forks: NDArray[np.int64] | None = None
    """[F, 2] where the response branches: token ``forks[i, 0]`` follows token ``forks[i, 1]``, not its predecessor. -1
    stands for the prompt's last token; -2: it starts a sequence of its own, which sees nothing before it, and is masked
    out because nothing predicts it. The first column ascends, from 1 on. None: each token follows its predecessor.

    The response is then a tree, such as all turns of an agent and its sub-agents, and counts as one sequence. A token
    sees the path that leads to it, and is computed once for all paths that it is on. Sums and means over a sequence
    (GSPO's ratio, sequence levels of `rollout_correction`, ``seq-mean`` modes, DPO) are over all tokens of the tree;
    GAE follows the order of the array, not the paths."""

    def __post_init__(self) -> None:
        for field in ("prompt_ids", "response_ids"):
            value: NDArray[np.int64] = getattr(self, field)
            if value.ndim != 1 or value.size == 0:
                raise BatchError(
                    f"{field} has shape {value.shape}; expected one dimension and at least one token"
                )
            if value.dtype != np.int64:
                raise BatchError(f"{field} has dtype {value.dtype}; expected int64")
        for field in ("response_mask", "environment_mask"):
            mask: NDArray[np.bool_] | None = getattr(self, field)
            if mask is not None and mask.dtype != np.bool_:
                raise BatchError(f"{field} has dtype {mask.dtype}; expected bool")
        shape = self.response_ids.shape
        for field in _PER_TOKEN:
            array: NDArray[np.generic] | None = getattr(self, field)
            if array is not None and array.shape != shape:
                raise BatchError(
                    f"{field} has shape {array.shape}; expected that of response_ids, {shape}"
                )
        self._check_kept()
        if self.forks is not None:
            self._check_forks(self.forks)
        routing = self.routed_experts
        if routing is not None and (routing.ndim != 3 or routing.shape[0] != self.num_inputs):
            raise BatchError(
                f"routed_experts has shape {routing.shape}; expected ({self.num_inputs}, layers, experts), for "
                f"{self.prompt_ids.size} prompt and {self.response_ids.size} response tokens without the last of each "
                "branch"
            )

    def _check_kept(self) -> None:
        counts = self.kept_counts
        ids = self.kept_ids
        if counts is None or ids is None:
            if counts is not ids:
                raise BatchError("one of kept_counts and kept_ids is None; expected both or none")
            return
        if ids.size != counts.sum():
            raise BatchError(
                f"kept_ids has {ids.size} tokens; expected {counts.sum()}, the sum of kept_counts"
            )
        places = np.repeat(np.arange(counts.size), counts)
        is_bad = counts > 0
        is_bad[places[ids == self.response_ids[places]]] = False
        if is_bad.any():
            i = int(is_bad.argmax())
            raise BatchError(
                f"kept_ids of token {i} lack response_ids[{i}] = {self.response_ids[i]}; expected it among the tokens "
                "that it was drawn from"
            )

    def _check_forks(self, forks: NDArray[np.int64]) -> None:
        if forks.ndim != 2 or forks.shape[1] != 2:
            raise BatchError(f"forks has shape {forks.shape}; expected (forks, 2)")
        if forks.dtype != np.int64:
            raise BatchError(f"forks has dtype {forks.dtype}; expected int64")
        starts = forks[:, 0]
        parents = forks[:, 1]
        earliest = np.append(1, starts + 1)[:-1]
        size = self.response_ids.size
        is_bad = (starts < earliest) | (starts >= size) | (parents < -2) | (parents >= starts)
        if is_bad.any():
            i = int(is_bad.argmax())
            raise BatchError(
                f"forks[{i}] is {forks[i].tolist()}; expected a token from {earliest[i]} to {size - 1}, and an earlier "
                "one that it follows, -1 for the prompt or -2 for nothing"
            )
        is_bad = (parents == -2) & (self.mask | self.predicted)[starts]
        if is_bad.any():
            i = int(is_bad.argmax())
            raise BatchError(
                f"forks[{i}] is {forks[i].tolist()} and the mask of token {starts[i]} is True; expected False, because "
                "nothing predicts it"
            )

    @property
    def parents(self) -> NDArray[np.int64]:
        """[R] the response token that each one follows; -1: the prompt's last token, -2: none."""
        parents = np.arange(-1, self.response_ids.size - 1)
        if self.forks is not None:
            parents[self.forks[:, 0]] = self.forks[:, 1]
        return parents

    @property
    def input_index(self) -> NDArray[np.int64]:
        """[num_inputs] which of the P + R tokens predict another: all but the last of each branch of the response."""
        parents = self.parents
        size = self.prompt_ids.size
        return np.append(np.arange(size), size + np.unique(parents[parents >= 0]))

    @property
    def num_inputs(self) -> int:
        """Tokens that predict another: P + R - 1 where there are no forks."""
        return self.input_index.size

    @property
    def prompt_key(self) -> bytes:
        """Equal for equal prompts with equal images."""
        if self.images is None:
            return self.prompt_ids.tobytes()
        count = self.images.count_before(self.prompt_ids.size)
        return self.prompt_ids.tobytes() + b"".join(self.images.digests[:count])

    @property
    def policy_log_probs(self) -> NDArray[np.float32] | None:
        """[R] under the policy before the step's first update: the trainer's if computed, else the engine's."""
        if self.old_log_probs is None:
            return self.rollout_log_probs
        return self.old_log_probs

    @property
    def mask(self) -> NDArray[np.bool_]:
        """[R] response tokens that count; not to be written to."""
        if self.response_mask is None:
            return _all_count(self.response_ids.size)
        return self.response_mask

    @property
    def squared_norms(self) -> NDArray[np.floating] | None:
        """[R] squared norm of each log-probability's gradient by the logits: 1 - 2 p(y) + sum_v p(v)^2."""
        if self.old_log_probs is None or self.sharp_log_probs is None:
            return None
        log_probs = np.where(self.mask, self.old_log_probs, 0.0)
        squares = np.exp(2 * log_probs - np.where(self.mask, self.sharp_log_probs, 0.0))
        return 1 - 2 * np.exp(log_probs) + squares

    @property
    def predicted(self) -> NDArray[np.bool_]:
        """[R] tokens of the environment that the policy may learn to predict."""
        if self.environment_mask is None:
            return np.zeros(self.response_ids.shape, np.bool_)
        return self.environment_mask

    def check_finite(self, name: str, *fields: str) -> None:
        """Apply `require_finite` to per-token arrays, at the tokens that count; None passes."""
        for field in fields:
            values: NDArray[np.float32] | None = getattr(self, field)
            if values is not None:
                require_finite(f"{name}.{field}", values, self.mask)


@lru_cache(maxsize=4096)
def _all_count(size: int) -> NDArray[np.bool_]:
    """Return [size] times True. A step reads the masks of its samples a dozen times."""
    mask = np.ones(size, np.bool_)
    mask.flags.writeable = False
    return mask


MicroBatch = list[Sample]
"""Samples computed in one forward and backward pass."""


NOTHING: MicroBatch = [Sample(prompt_ids=np.zeros(2, np.int64), response_ids=np.zeros(1, np.int64))]
"""A micro-batch that a rank computes while others still have some: a divided model's collectives need all ranks.

Its row has two tokens, because compiled layers would need graphs of their own for a row of one.
"""


def filled_up(micro_batches: Sequence[MicroBatch], num_passes: int) -> list[MicroBatch]:
    """Return ``num_passes`` micro-batches: these, and then `NOTHING`."""
    return list(micro_batches) + [NOTHING] * (num_passes - len(micro_batches))


def by_sample(
    values: Sequence[NDArray[np.float32]], micro_batches: Sequence[MicroBatch]
) -> list[list[NDArray[np.float32]]]:
    """Split the [N] values of each micro-batch into the [R] of each sample."""
    by_batch: list[list[NDArray[np.float32]]] = []
    for batch_values, batch in zip(values, micro_batches, strict=True):
        ends = np.cumsum([sample.response_ids.size for sample in batch])
        by_batch.append(np.split(batch_values, ends[:-1]))
    return by_batch
