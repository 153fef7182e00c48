"""Settings of a generative reward model: how it is asked, and how its verdicts are read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from gcore_rollout import JudgeModel, Reduce, SamplingParams, ScorePattern
from gcore_runs.errors import UserError
from gcore_runs.settings.run_config import Checked, at_least


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Checked):
    """The questions to a generative reward model, and the reading of its verdicts; an app adds the engine."""

    template: str = ""
    """File with the question, with fields in braces; empty: how good it is, from 0 to 10."""
    n: Annotated[int, at_least(1, "at least 1")] = 1
    """Verdicts on each question."""
    reduce: Reduce = "mean"
    """How several verdicts become one score."""
    temperature: Annotated[float, at_least(0, "at least 0")] = 1.0
    """Temperature of its sampling; 0: greedy."""
    max_response_length: Annotated[int, at_least(1, "at least 1")] = 512
    """Longest verdict in tokens."""
    pattern: str = ""
    """Regular expression whose first group is the score; its last match in a verdict counts. Empty: "Score: 7"."""
    low: float = 0.0
    """The score that is scaled to 0."""
    high: float = 10.0
    """The score that is scaled to 1."""

    def question(self) -> str:
        """Read the file of the question; empty: there is none.

        Raises:
            UserError: the file cannot be read.
        """
        try:
            return Path(self.template).read_text("utf-8") if self.template else ""
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.section}.template is {self.template!r}: {error}") from None

    def model(self, **fields: Any) -> JudgeModel:
        """Return the model that is asked so; ``fields`` are the others of `JudgeModel`."""
        sampling = SamplingParams(max_tokens=self.max_response_length, temperature=self.temperature)
        return JudgeModel(sampling=sampling, n=self.n, **fields)

    def scores(self) -> ScorePattern:
        """Return what reads the score of a verdict; `UserError` if the scores to scale are one."""
        if self.low == self.high:
            raise UserError(f"{self.section}.low and high are both {self.low}; expected two scores")
        return ScorePattern(pattern=self.pattern or ScorePattern.pattern, low=self.low, high=self.high)
