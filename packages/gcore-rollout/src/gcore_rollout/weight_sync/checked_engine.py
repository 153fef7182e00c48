"""An engine whose weights are compared with the trainer's after every update."""

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gcore_rollout.engines.protocol import Engine
from gcore_rollout.engines.types import RequestT, SampleT
from gcore_rollout.engines.wrappers import WrappedEngine
from gcore_rollout.errors import WrongWeightsError
from gcore_rollout.weight_sync.report import Digest, Digests, HeldTensor, digests_of, report_weights

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

_TIME_SHARE = 0.01
_MIN_BYTES = 8 << 20
_MIN_TENSORS = 4
_MAX_NAMED = 3


class WeightRecord:
    """Digests of the trainer's weights, by version: the first one and the last few, to explain what an engine has."""

    def __init__(self) -> None:
        self._versions: dict[int, Digests] = {}

    def note(self, version: int, digests: Digests) -> None:
        """Keep the digests of a version."""
        self._versions[version] = dict(digests)
        for old in sorted(self._versions)[1:-2]:
            del self._versions[old]

    def explanation(self, tensor: HeldTensor, version: int) -> str:
        """Which weights a tensor is, if not those of its source at ``version``."""
        for other, digests in sorted(self._versions.items(), reverse=True):
            if other != version and _digest(digests, tensor.source, tensor.dtype) == tensor.digest:
                return f"has the values of version {other}"
        present = self._versions[version]
        for other in present:
            if other != tensor.source and _digest(present, other, tensor.dtype) == tensor.digest:
                return f"has the values of {other!r}"
        expected = _digest(present, tensor.source, tensor.dtype)
        if expected is not None and expected.unordered == tensor.digest.unordered:
            return "has its values in another order"
        return "has other values"


class Rotation:
    """Chooses which tensors to check after an update: as many as fit into the time, in turn."""

    def __init__(self) -> None:
        self._costs: dict[str, tuple[int, float]] = {}
        """Bytes and seconds of each tensor, the next one first."""

    def note(self, tensors: Sequence[HeldTensor]) -> None:
        """Take the costs of tensors that have just been checked; they are the last in the line."""
        for tensor in tensors:
            self._costs.pop(tensor.name, None)
            self._costs[tensor.name] = tensor.size_bytes, tensor.seconds

    def choose(self, step_s: float) -> list[str] | None:
        """Names to check after a step that took so long; None: all.

        They take 1 % of the step by what their last check took, or are 8 MiB, or 4 tensors, whichever is more.
        """
        names: list[str] = []
        num_bytes, seconds = 0, 0.0
        for name, (size_bytes, cost_s) in self._costs.items():
            num_bytes, seconds = num_bytes + size_bytes, seconds + cost_s
            if num_bytes > _MIN_BYTES and seconds > _TIME_SHARE * step_s and len(names) >= _MIN_TENSORS:
                return names
            names.append(name)
        return None


class CheckedEngine(WrappedEngine[RequestT, SampleT]):
    """An engine that is asked, after every update, which weights it computes with.

    All tensors are compared after the first update and by `check_weights`; after later ones as many as 1 % of the time
    since the last update allows, in turn, and at least 8 MiB of them. What is compared is read from the model, so it
    does not matter on which way a tensor went wrong. An engine that cannot report its weights, and weights without
    digests (`weight_digests.DigestedWeights`), pass unchecked.

    Args:
        engine: that takes the weights.
        name: in errors, such as "engine 3".
        record: shared by the replicas of a model; None: one of its own.
    """

    def __init__(self, engine: Engine[RequestT, SampleT], *, name: str, record: WeightRecord | None = None) -> None:
        super().__init__(engine)
        self.name = name
        self._record = record or WeightRecord()
        self._rotation = Rotation()
        self._checked_s: float | None = None

    async def update_weights(self, weights: "Iterable[tuple[str, torch.Tensor]]", *, version: int) -> None:
        """See `Engine.update_weights`.

        Raises:
            WrongWeightsError: the engine has other weights than these now.
        """
        # Taken before the update: while it is under way, a `SharedWeights` may be given the next version. Digests of
        # weights that are made one by one are filled in during the update.
        digests = digests_of(weights)
        await super().update_weights(weights, version=version)
        if digests:
            names = None if self._checked_s is None else self._rotation.choose(time.monotonic() - self._checked_s)
            await self._check(digests, version, names)
            self._checked_s = time.monotonic()

    async def check_weights(self, digests: Digests) -> None:
        """See `ChecksWeights.check_weights`."""
        if digests:
            await self._check(digests, self.weight_version, None)

    async def _check(self, digests: Digests, version: int, names: Sequence[str] | None) -> None:
        self._record.note(version, digests)
        held = await report_weights(self._engine, names)
        if held is None:
            return
        if held.version != version:
            raise WrongWeightsError(f"{self.name} has weights of version {held.version}; expected version {version}")
        self._rotation.note(held.tensors)
        compared = [t for t in held.tensors if _digest(digests, t.source, t.dtype) is not None]
        wrong = [t for t in compared if _digest(digests, t.source, t.dtype) != t.digest]
        if wrong:
            raise WrongWeightsError(
                self._complaint(wrong, len(compared), version), tensors=tuple(tensor.name for tensor in wrong)
            )
        if names is None and (left := sorted(digests.keys() - {t.source for t in compared})):
            _logger.warning(
                "%s: %d of %d tensors cannot be compared with the trainer's, among them %s",
                self.name,
                len(left),
                len(digests),
                left[0],
            )

    def _complaint(self, wrong: Sequence[HeldTensor], num_compared: int, version: int) -> str:
        named = [f"{t.name!r} {self._record.explanation(t, version)}" for t in wrong[:_MAX_NAMED]]
        more = f" and {len(wrong) - len(named)} more differ" if len(wrong) > len(named) else ""
        return (
            f"{self.name} does not have the trainer's weights of version {version}: {'; '.join(named)}{more} "
            f"({len(wrong)} of {num_compared} compared tensors are wrong)"
        )


def _digest(digests: Digests, name: str, dtype: str) -> Digest | None:
    return digests.get(name, {}).get(dtype)
