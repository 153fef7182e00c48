"""Settings of a generated task."""

from dataclasses import dataclass, field
from typing import Any

from gcore_runs import Checked, Count, UserError


@dataclass(frozen=True, kw_only=True)
class TaskConfig(Checked, section="task"):
    """A reasoning-gym task, generated instead of read from files."""

    name: str = ""
    """Task of reasoning-gym, such as chain_sum; empty: prompts come from data.train-files."""
    params: dict[str, Any] = field(default_factory=dict[str, Any])
    """The task's own settings, of the types that reasoning-gym gives them; on the command line --task.params.NAME and a
    number, true or false, text, several values, or a TOML value such as '{a = [1, 2]}'; None where it is accepted."""
    num_train: Count = 10_000
    """Training problems to generate; those that are also held out are left out."""
    num_val: Count = 256
    """Held-out problems to generate."""

    def check_only_source(self, train_files: tuple[str, ...], *, of: str) -> None:
        """Raise `UserError` if there are files, too."""
        if train_files and self.name:
            raise UserError(
                f"task.name is {self.name!r} and data.train_files is set; expected one source of {of}"
            )
