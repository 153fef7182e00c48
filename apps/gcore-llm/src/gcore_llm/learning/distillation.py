"""On-policy distillation: settings, and the check of the teachers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gcore_runs import Checked, Positive, UserError

ANY_SOURCE = "*"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Checked, section="distillation"):
    """Teachers, whose log-probabilities of the policy's own responses the policy learns from."""

    teachers: tuple[str, ...] = ()
    """Models, by folder or by name, with the policy's tokenizer: the reverse KL divergence to them falls, token by
    token; with algorithm.adv-estimator distillation no reward is needed, with others it is added to the advantages."""
    coef: Positive = 1.0
    """Weight of that divergence next to the advantages of algorithm.adv-estimator."""
    weights: tuple[Positive, ...] = ()
    """Weight of each teacher's divergence, of which those for a prompt are divided by their sum; empty: all alike."""
    sources: tuple[str, ...] = ()
    """For each teacher, the source of the prompts that it teaches, or * for all; empty: all teach all prompts. Prompts
    of other sources learn from rewards alone."""
    source_key: str = "data_source"
    """Column that names a prompt's source, with distillation.sources."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("weights", "sources"):
            count = len(getattr(self, name))
            self.require(name, count in (0, len(self.teachers)), f"none, or {len(self.teachers)}, one for each teacher")

    def check_with(self, adv_estimator: str, filter_groups: bool, runtime: str) -> None:
        """Raise `UserError` for settings of the algorithm and the run that teachers do not fit."""
        if self.teachers and filter_groups:
            raise UserError(
                "algorithm.filter_groups is true; expected false with distillation.teachers, from which every group "
                "learns"
            )
        if not self.teachers and adv_estimator == "distillation":
            raise UserError(
                "algorithm.adv_estimator is 'distillation'; expected another one without distillation.teachers"
            )
        self.require("teachers", not self.teachers or runtime != "sim", "none with runtime 'sim'")

    @property
    def roles(self) -> dict[str, str]:
        """The teachers by the names of their roles."""
        return {f"teacher-{number}": folder for number, folder in enumerate(self.teachers)}

    def shares(self, source: str) -> dict[str, float]:
        """Return the weights of the teachers of a source's prompts, by role; they sum to 1."""
        sources = self.sources or [ANY_SOURCE] * len(self.teachers)
        weights = self.weights or [1.0] * len(self.teachers)
        own = {
            role: weight
            for role, weight, taught in zip(self.roles, weights, sources, strict=True)
            if taught in (ANY_SOURCE, source)
        }
        return {role: weight / sum(own.values()) for role, weight in own.items()}


def check_teachers(teachers: Sequence[str], tokenizer: Any, *, max_length: int) -> None:
    """Raise `UserError` unless each is a model with the policy's tokens, which takes sequences of so many tokens."""
    # Not for the command line, which reads the settings above.
    from gcore_runs import build_tokenizer, check_model, max_sequence_length, model_folder

    own: dict[str, int] = tokenizer.get_vocab()
    for name in teachers:
        folder = model_folder(name, setting="distillation.teachers")
        check_model(folder, setting="distillation.teachers")
        limit = max_sequence_length(folder)
        if limit is not None and limit < max_length:
            raise UserError(
                f"distillation.teachers holds {name!r}, which takes at most {limit} tokens; expected models that take "
                f"data.max_prompt_length + data.max_response_length = {max_length}"
            )
        others: dict[str, int] = build_tokenizer(folder).get_vocab()
        if differing := {token for token, _ in own.items() ^ others.items()}:
            token = min(differing)
            raise UserError(
                f"distillation.teachers holds {name!r}; expected models with the policy's tokenizer: of "
                f"{len(differing)} tokens that differ, {token!r} is {own.get(token)} for the policy and "
                f"{others.get(token)} for this teacher"
            )
