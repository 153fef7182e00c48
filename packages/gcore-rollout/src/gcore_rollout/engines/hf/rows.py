"""The state of the `hf` engine's running samples as arrays."""

import numpy as np
from numpy.typing import NDArray

from gcore_rollout.engines.queueing import Sample
from gcore_rollout.engines.repetition import runs_at_end
from gcore_rollout.engines.sampling import sample_seeds


class Rows:
    """State of the running samples, slot i in row i, so that the bookkeeping of a step is a few vector operations."""

    def __init__(self, num_rows: int) -> None:
        self.samples: list[Sample] = []
        self.seeds = np.zeros(num_rows, np.uint64)
        self.temperatures = np.zeros(num_rows, np.float32)
        self.prompt_lengths = np.zeros(num_rows, np.int64)
        self.num_sampled = np.zeros(num_rows, np.int64)
        self.max_tokens = np.zeros(num_rows, np.int64)
        self.last_tokens = np.zeros(num_rows, np.int64)
        self.rope_offsets = np.zeros(num_rows, np.int64)
        self.tokens = np.zeros((num_rows, 0), np.int64)
        self.log_probs = np.zeros((num_rows, 0), np.float32)
        self.versions = np.zeros((num_rows, 0), np.int32)
        self.min_pattern_sizes = np.zeros(num_rows, np.int64)
        self.max_pattern_sizes = np.zeros(num_rows, np.int64)
        self.min_counts = np.zeros(num_rows, np.int64)
        self.runs = np.zeros((num_rows, 0), np.int64)

    def __len__(self) -> int:
        return len(self.samples)

    def add(self, group: list[Sample]) -> None:
        """Put samples of one request that start from the same tokens into the next rows."""
        sampling, prefix_length = group[0].request.sampling, group[0].prefix_length
        detection = sampling.repetition_detection
        if detection is not None:
            self._widen("runs", detection.max_pattern_size)
        for name in ("tokens", "log_probs", "versions"):
            self._widen(name, sampling.max_tokens)

        slots = slice(len(self), len(self) + len(group))
        self.samples.extend(group)
        self.seeds[slots] = sample_seeds(group[0].request.seed, np.array([s.index for s in group]))
        self.temperatures[slots] = sampling.temperature
        self.prompt_lengths[slots] = len(group[0].request.prompt_token_ids)
        self.num_sampled[slots] = prefix_length
        self.max_tokens[slots] = sampling.max_tokens
        self.rope_offsets[slots] = 0
        self.min_pattern_sizes[slots] = 0 if detection is None else detection.min_pattern_size
        self.max_pattern_sizes[slots] = 0 if detection is None else detection.max_pattern_size
        self.min_counts[slots] = 0 if detection is None else detection.min_count
        prefix = group[0].prefix
        if prefix is None:
            self.runs[slots] = 0
        else:
            self.tokens[slots, :prefix_length] = prefix.token_ids
            self.runs[slots] = runs_at_end(prefix.token_ids, self.runs.shape[1])

    def move(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Copy rows ``src`` to rows ``dst``, both of shape [M]."""
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array[dst] = array[src]
        for s, d in zip(src.tolist(), dst.tolist(), strict=True):
            self.samples[d] = self.samples[s]

    def _widen(self, name: str, num_columns: int) -> None:
        array = getattr(self, name)
        if (missing := num_columns - array.shape[1]) > 0:
            setattr(self, name, np.pad(array, ((0, 0), (0, missing))))
