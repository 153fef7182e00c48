"""Memory of the `hf` engine's keys and values."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The most keys and values that an `HFEngine` stores: ``num_slots * slot_length`` tokens."""

    num_slots: int
    """Most samples that run at once."""
    slot_length: int
    """Longest prompt and completion in tokens, rounded up as the engine allocates it."""
    bytes_per_token: int
    """Keys and values of a token in all layers."""

    @property
    def kv_cache_bytes(self) -> int:
        """Keys and values of as many samples as run at once, each at its longest."""
        return self.num_slots * self.slot_length * self.bytes_per_token

    def limited_to(self, kv_cache_bytes: int) -> Self:
        """Return the plan with as many samples as that memory takes; a `ValueError` if it takes none."""
        per_sample = self.slot_length * self.bytes_per_token
        if kv_cache_bytes < per_sample:
            raise ValueError(
                f"kv_cache_bytes is {kv_cache_bytes:,}; expected at least {per_sample:,}, the keys and values of one "
                f"sample of {self.slot_length} tokens"
            )
        return replace(self, num_slots=min(self.num_slots, kv_cache_bytes // per_sample))
