"""Groups: the images of one prompt, with their scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_diffusion.sampling.prompts import Prompt
from gcore_rollout import ImageSample, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One prompt's images."""

    prompt_index: int
    """Position of the prompt in the global order, unique in the run."""
    prompt: Prompt
    samples: list[ImageSample]
    scores: NDArray[np.float64]
    """[n]."""
    ref_means: list[NDArray[np.float32]] | None = None
    """The reference's means of each image's recorded steps, [K, ...]; None: the algorithm does not need them."""

    @property
    def has_signal(self) -> bool:
        """True if the scores differ, so that something can be learned from them."""
        return bool(np.ptp(self.scores) > 0)

    @property
    def oldest_version(self) -> int:
        """Oldest weight version that generated an image."""
        return min(sample.weight_version for sample in self.samples)

    def state(self) -> dict[str, Any]:
        """Return plain arrays and numbers for a checkpoint."""
        samples: list[dict[str, Any]] = []
        for s in self.samples:
            fields = {name: value for name, value in vars(s).items() if name != "trajectory"}
            samples.append(
                {
                    **fields,
                    "conditions": dict(s.conditions),
                    "shared_conditions": dict(s.shared_conditions),
                    "trajectory": dict(vars(s.trajectory)),
                }
            )
        return {
            "ticket": self.prompt_index,
            "text": self.prompt.text,
            "row": dict(self.prompt.row),
            "scores": self.scores,
            "samples": samples,
            "ref_means": self.ref_means,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """Return the group that `state` gave this state for."""
        samples: list[ImageSample] = []
        for fields in state["samples"]:
            rest = {name: value for name, value in fields.items() if name != "trajectory"}
            samples.append(ImageSample(**rest, trajectory=Trajectory(**fields["trajectory"])))
        return cls(
            prompt_index=state["ticket"],
            prompt=Prompt(text=state["text"], row=state["row"]),
            samples=samples,
            scores=np.asarray(state["scores"], np.float64),
            ref_means=None if state["ref_means"] is None else [np.asarray(m, np.float32) for m in state["ref_means"]],
        )
