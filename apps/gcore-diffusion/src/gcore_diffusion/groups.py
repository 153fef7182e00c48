"""The images of one prompt, with their scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gcore_diffusion.prompts import Prompt
from gcore_rollout import ImageSample, Trajectory


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One prompt's images."""

    ticket: int
    """Place of the prompt in the global order, unique in the run."""
    prompt: Prompt
    samples: list[ImageSample]
    scores: NDArray[np.float64]
    """[n]."""
    ref_means: list[NDArray[np.float32]] | None = None
    """Of each image [K, ...], at its recorded steps: the reference's, where it is asked."""

    @property
    def has_signal(self) -> bool:
        """Whether the scores differ, so that something can be learned from them."""
        return bool(np.ptp(self.scores) > 0)

    def state(self) -> dict[str, Any]:
        """In words of a checkpoint; see `from_state`."""
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
            "ticket": self.ticket,
            "text": self.prompt.text,
            "row": dict(self.prompt.row),
            "scores": self.scores,
            "samples": samples,
            "ref_means": self.ref_means,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Group":
        """The opposite of `state`."""
        samples: list[ImageSample] = []
        for fields in state["samples"]:
            rest = {name: value for name, value in fields.items() if name != "trajectory"}
            samples.append(ImageSample(**rest, trajectory=Trajectory(**fields["trajectory"])))
        return cls(
            ticket=state["ticket"],
            prompt=Prompt(text=state["text"], row=state["row"]),
            samples=samples,
            scores=np.asarray(state["scores"], np.float64),
            ref_means=None if state["ref_means"] is None else [np.asarray(m, np.float32) for m in state["ref_means"]],
        )
