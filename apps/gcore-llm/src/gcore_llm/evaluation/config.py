"""Settings of evaluation on held-out prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self

from gcore_llm.evaluation.sets import val_sources
from gcore_runs import Amount, Bound, Checked, FractionAbove0, NonNegative, UserError, at_least
from gcore_runs.settings.checks import convert_value

_SET_TYPES: dict[str, Any] = {
    "n": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "reward": str,
}
"""Settings that a set may have of its own, and their types."""
NEEDS_TOP_K = (
    "1 or more with rollout.engine 'vllm' on a GPU, which returns kept tokens only with a top-k"
)
_FINITE = Bound(lambda score: abs(score) < float("inf"), "a finite number")


@dataclass(frozen=True, kw_only=True)
class ValConfig(Checked, section="rollout.val_kwargs"):
    """Responses to held-out prompts: one greedily, and some by sampling."""

    n: NonNegative = 1
    """Sampled responses to each held-out prompt, next to the greedy one; from 2 on there are pass@k and maj@k, too."""
    temperature: Amount = 0.0
    """Temperature of the sampled ones; 0: rollout.temperature."""
    top_p: FractionAbove0 = 1.0
    """The sampled ones are drawn from the fewest most probable tokens with at least this probability together; 1: from
    all. Those of training have rollout.top_p."""
    top_k: Annotated[int, at_least(-1, "1 or more, or -1 for all tokens")] = -1
    """The sampled ones are drawn from so many most probable tokens; -1 or 0: from all."""
    right_from: Annotated[float, _FINITE] = 1.0
    """Lowest score of a response that pass@k counts as right."""
    sets: dict[str, Any] = field(default_factory=dict[str, Any])
    """Other values of n, temperature, top_p and top_k for single sets of data.val-files, and their reward in place of
    the run's, by the set's name: --rollout.val-kwargs.sets.NAME '{n = 32, reward = "aime"}'."""

    def of_set(self, name: str) -> Self:
        """Return these settings with what the set of this name has of its own; `UserError` if that is wrong."""
        where = f"rollout.val_kwargs.sets.{name}"
        settings = self.sets.get(name, {})
        names = ", ".join(_SET_TYPES)
        if not isinstance(settings, Mapping):
            raise UserError(f"{where} is {settings!r}; expected a table of {names}")
        unknown = settings.keys() - _SET_TYPES.keys()
        if unknown:
            raise UserError(f"{where} has {', '.join(sorted(map(str, unknown)))}; expected {names}")
        values: dict[str, Any] = {}
        for key, value in settings.items():
            if key != "reward":
                values[key] = convert_value(f"{where}.{key}", value, _SET_TYPES[key])
        try:
            return replace(self, **values, sets={})
        except UserError as error:
            raise UserError(str(error).replace("rollout.val_kwargs", where)) from None

    def rewards(self, val_files: Sequence[str]) -> dict[str, str]:
        """Return the rewards that sets of data.val_files have in place of the run's, by the set's name."""
        rewards: dict[str, str] = {}
        for source in val_sources(val_files, setting="data.val_files"):
            if source.published:
                rewards[source.name] = source.published.reward
        for name, settings in self.sets.items():
            if "reward" in settings:
                rewards[name] = str(settings["reward"])
        return rewards

    def check(self, val_files: Sequence[str], *, compares: bool, needs_top_k: bool = False) -> None:
        """Raise `UserError` for a set that data.val_files does not name, or more than two responses to be compared."""
        names = [
            source.name
            for source in val_sources(val_files, setting="data.val_files")
            if source.name
        ]
        unknown = self.sets.keys() - set(names)
        if unknown:
            accepted = ", ".join(names) or "none has a name"
            raise UserError(
                f"rollout.val_kwargs.sets has {min(unknown)!r}; expected a set of data.val_files: {accepted}"
            )
        for settings in map(self.of_set, ["", *names]):
            reason = "1 with a reward_model.judge.method that compares responses"
            settings.require("n", settings.n == 1 or not compares, reason)
            is_drawn = needs_top_k and settings.n
            settings.require("top_k", settings.top_k > 0 or not is_drawn, NEEDS_TOP_K)
