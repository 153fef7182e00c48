"""Settings of algorithms and teachers: how the policy learns from scores and from other log-probabilities."""

import string
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Annotated, Any, Literal

from gcore_runs import Amount, BaseAlgorithmConfig, Bound, Checked, Positive, UserError
from gcore_runs.settings.checks import override
from gcore_trainer import (
    AdvantageEstimator,
    ConfigError,
    KLControlConfig,
    OverlongConfig,
    RolloutCorrectionConfig,
    get_advantage_estimator,
    options_type,
)

ANY_SOURCE = "*"
OF_RESPONSES: tuple[str, ...] = ("feedback", "success")
"""Fields of distillation.prompt that are no columns."""


def template_fields(template: str) -> list[str]:
    """Return the names in the braces of a template; none if it has others than names, or braces that do not match."""
    try:
        names = [name for _, name, *_ in string.Formatter().parse(template) if name is not None]
    except ValueError:
        return []
    return names if all(map(str.isidentifier, names)) else []


_TEMPLATE = Bound(
    lambda template: not template or bool(template_fields(template)),
    "text with {COLUMN}, {feedback} or {success} in it, and other braces doubled",
)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig(BaseAlgorithmConfig):
    """From scores to advantages.

    Example:
        >>> AlgorithmConfig(adv_estimator="gae", options={"lam": 0.95}).estimator.needs_critic
        True
    """

    adv_estimator: str = "grpo"
    """How scores become advantages: against the group (grpo, dr_grpo, gdpo, rloo, reinforce_plus_plus_baseline, opo,
    maxrl, grpo_passk, optimal_token_baseline), turns against those at the same state (gigpo), turns or steps against
    those of the group (grpo_process), turns against a moving average of their agent (rae), a greedy response (remax),
    the batch (reinforce_plus_plus, flash_reinforce) or a critic (gae); not at all, with teachers alone (distillation);
    or by your own function (PATH.py:function)."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Parameters of the chosen adv_estimator or actor.loss.loss_mode alone, and of what is added to every loss
    (echo_coef), listed in docs/reference/algorithms.md; on the command line --algorithm.options.NAME and a value."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    old_log_probs: Literal["rollout", "trainer"] = "rollout"
    """Denominator of the ratio: the engine's own log-probs, or the trainer's before its first update of the step."""
    max_rollout_kl: Amount = 0.01
    """A line on the screen warns when engine and trainer, with the same weights, differ by more nats: per token
    (training/rollout_k3_kl, of a sample of each step's responses) or position (training/rollout_distribution_kl); 0:
    they are not compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Raises for an estimator that there is not, and for values of its options.
        assert self.advantage_options is not None

    @property
    def estimator(self) -> AdvantageEstimator:
        """The advantage estimator, with what it needs; `UserError` if there is none of this name."""
        try:
            return get_advantage_estimator(self.adv_estimator)
        except ConfigError as error:
            raise UserError(f"algorithm.{error}") from None

    @cached_property
    def advantage_options(self) -> Mapping[str, Any]:
        """The options of the advantage estimator; `UserError` if a value does not fit."""
        return self._read_options(options_type(self.estimator.function))

    @property
    def learns_environment(self) -> bool:
        """True if the policy learns to predict its environment, whatever the advantages are."""
        return bool(self.options.get("echo_coef"))

    def loss_options(self, loss_mode: str) -> dict[str, Any]:
        """Return the options of the policy loss of this name and its terms; `UserError` if a value does not fit."""
        # It needs torch, which reading settings does not.
        from gcore_trainer import PolicyObjective

        return self._read_options(PolicyObjective.options_type(loss_mode))

    def _read_options(self, kind: type[Any]) -> dict[str, Any]:
        own = {f.name: self.options[f.name] for f in fields(kind) if f.name in self.options}
        return asdict(override(kind, own, "algorithm.options"))


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(Checked, section="distillation"):
    """Teachers, whose log-probabilities of the policy's own responses the policy learns from.

    Example:
        >>> own = DistillationConfig(prompt="{prompt} The solution is {answer}.")
        >>> own.shares("any")  # the policy itself, by its role in training
        {'actor': 1.0}
        >>> own.columns
        ['prompt', 'answer']
    """

    teachers: tuple[str, ...] = ()
    """Models, by folder or by name, with the policy's tokenizer: the reverse KL divergence to them falls, token by
    token; with algorithm.adv-estimator distillation no reward is needed, with others it is added to the advantages."""
    prompt: Annotated[str, _TEMPLATE] = ""
    """The prompt of teachers, in place of the policy's or of its last message: a text with columns of the row, such as
    '{prompt} The solution is {answer}.', with {feedback} of the reward, or with {success}, the group's best response if
    it is better. Responses without one of these are not taught. Without distillation.teachers the policy is its own
    teacher: self-distillation. Empty: the policy's."""
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
            self.require(
                name,
                count in (0, len(self.teachers)),
                f"none, or {len(self.teachers)}, one for each teacher",
            )

    def check_with(self, adv_estimator: str, *, is_simulated: bool) -> None:
        """Raise `UserError` for settings of the algorithm and the run that teachers do not fit."""
        if not self.is_used and adv_estimator == "distillation":
            raise UserError(
                "algorithm.adv_estimator is 'distillation'; expected another one without distillation.teachers and "
                "distillation.prompt"
            )
        name = "prompt" if self.prompt else "teachers"
        self.require(name, not (self.is_used and is_simulated), "none in a simulation")

    @property
    def is_used(self) -> bool:
        return bool(self.teachers or self.prompt)

    @property
    def columns(self) -> list[str]:
        """The columns that are read of a row."""
        names = [name for name in template_fields(self.prompt) if name not in OF_RESPONSES]
        if self.sources:
            names.append(self.source_key)
        return names

    @property
    def roles(self) -> dict[str, str]:
        """The teachers by the names of their roles."""
        return {f"teacher-{number}": folder for number, folder in enumerate(self.teachers)}

    def shares(self, source: str) -> dict[str, float]:
        """Return the weights of the teachers of a source's prompts, by role; they sum to 1."""
        if not self.teachers:
            return {"actor": 1.0}
        sources = self.sources or [ANY_SOURCE] * len(self.teachers)
        weights = self.weights or [1.0] * len(self.teachers)
        teachers = zip(self.roles, weights, sources, strict=True)
        role_weights = {
            role: weight for role, weight, taught in teachers if taught in (ANY_SOURCE, source)
        }
        total = sum(role_weights.values())
        return {role: weight / total for role, weight in role_weights.items()}
