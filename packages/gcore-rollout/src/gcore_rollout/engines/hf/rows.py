"""The running samples of the `hf` engine."""

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.queueing import QueuedSample, sample_seeds
from gcore_rollout.engines.repetition import runs_at_end

ALL_TOKENS = 2**31 - 1
"""Top-k of samples that are drawn from all tokens."""


class SampleRows:
    """State of the running samples, slot i in row i, so that the bookkeeping of a step is a few vector operations."""

    def __init__(self, num_rows: int) -> None:
        self.samples: list[QueuedSample] = []
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperatures = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float32)
        self.top_k = np.full(num_rows, ALL_TOKENS, np.int64)
        (
            self.prompt_lengths,
            self.num_sampled,
            self.max_tokens,
            self.last_tokens,
            self.rope_offsets,
        ) = np.zeros((5, num_rows), np.int64)
        self.tokens = np.zeros((num_rows, 0), np.int64)
        self.log_probs = np.zeros((num_rows, 0), np.float32)
        self.versions = np.zeros((num_rows, 0), np.int32)
        # Least and largest size of a pattern, and how often it must come; 0: repetitions are not looked for.
        self.patterns = np.zeros((num_rows, 3), np.int64)
        self.runs = np.zeros((num_rows, 0), np.int64)
        self.has_stop = np.zeros(num_rows, bool)

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, group: list[QueuedSample]) -> None:
        """Put samples of one request that start from the same tokens into the next rows."""
        sampling = group[0].request.sampling
        prefix_length = group[0].prefix_length
        detection = sampling.repetition_detection
        pattern = (0, 0, 0)
        if detection is not None:
            self._add_columns("runs", detection.max_pattern_size)
            pattern = (detection.min_pattern_size, detection.max_pattern_size, detection.min_count)
        for name in ("tokens", "log_probs", "versions"):
            self._add_columns(name, sampling.max_tokens)

        slots = slice(len(self), len(self) + len(group))
        self.samples.extend(group)
        indices = np.array([sample.index for sample in group])
        self.seeds[slots] = sample_seeds(group[0].request.seed, indices)
        self.temperatures[slots] = sampling.temperature
        self.top_p[slots] = sampling.top_p if sampling.truncates else 1
        self.top_k[slots] = ALL_TOKENS
        if sampling.truncates and sampling.top_k > 0:
            self.top_k[slots] = sampling.top_k
        self.prompt_lengths[slots] = len(group[0].request.prompt_token_ids)
        self.num_sampled[slots] = prefix_length
        self.max_tokens[slots] = sampling.max_tokens
        self.rope_offsets[slots] = 0
        self.patterns[slots] = pattern
        self.runs[slots] = 0
        self.has_stop[slots] = bool(sampling.stop)
        if prefix_length:
            prefix = group[0].prefix.token_ids
            self.tokens[slots, :prefix_length] = prefix
            self.runs[slots] = runs_at_end(prefix, self.runs.shape[1])

    @property
    def truncates(self) -> bool:
        """True if a running sample is drawn by top-p or top-k."""
        live = slice(len(self))
        return bool((self.top_p[live] < 1).any() or (self.top_k[live] < ALL_TOKENS).any())

    def move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Copy rows ``src`` to rows ``dst``, both of shape [M]."""
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[dst] = array[src]
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            self.samples[d] = self.samples[s]

    def _add_columns(self, name: str, num_columns: int) -> None:
        """Append zeros to an array until it has so many columns."""
        array = getattr(self, name)
        num_missing = num_columns - array.shape[1]
        if num_missing > 0:
            setattr(self, name, np.pad(array, ((0, 0), (0, num_missing))))
