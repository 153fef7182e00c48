"""Arguments of `gcore-llm eval`."""

import json
from dataclasses import dataclass
from typing import Any, Literal

import tyro

from gcore_runs import Checked, NonNegative


@dataclass(frozen=True, kw_only=True)
class EvalArgs(Checked):
    """Score a model, or a run's policy, on sets of prompts.

    The results are in a folder: results.json has the estimates with their standard errors, responses.jsonl every
    response with its score. The same command continues an interrupted evaluation.
    """

    model: tyro.conf.Positional[str]
    """A run's folder, that of a model, or NAMESPACE/NAME[@REVISION] of a model on the Hugging Face Hub."""
    on: tuple[str, ...] = ()
    """Sources of prompts, NAME=SOURCE for a set with a name, or published sets by name, as data.val-files has them;
    empty: a run's held-out prompts."""
    reward: str = ""
    """Scores the responses to prompts of files, as in training; empty: the run's. Published sets bring their own."""
    n: int | None = None
    """Sampled responses to each prompt, next to the greedy one; None: as in the run, or 1."""
    temperature: float | None = None
    """Temperature of the sampled ones; None: as in the run, or 1."""
    top_p: float | None = None
    """The sampled ones are drawn from the fewest most probable tokens with at least this probability together; None: as
    in the run, or 1, from all."""
    top_k: int | None = None
    """The sampled ones are drawn from so many most probable tokens; None: as in the run, or -1, from all."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; empty: as in the run, or none."""
    chat_template_kwargs: str = ""
    """Further variables of the model's chat template as a JSON object, such as '{"enable_thinking": false}'; empty: as
    in the run, or none."""
    max_tokens: NonNegative = 0
    """Longest response; 0: as in the run, or 2048, or for what a model has capacity."""
    limit: NonNegative = 0
    """Only the first prompts of each set, so many; 0: all."""
    prompt_key: str = ""
    """Column of the prompt; empty: as in the run, or prompt."""
    image_key: str = ""
    """Column of a prompt's images, as data.image_key has it; empty: as in the run, or none."""
    checkpoint: Literal["latest", "best"] = "latest"
    """Which policy of a run: that of its last checkpoint, or the best one, which trainer.export best keeps."""
    engine: str = ""
    """hf or vllm; empty: the run's, or hf."""
    num_processes: int | None = None
    """Replicas of the engine, each a process with a device of its own; None: as in the run, or 0, in this process."""
    out: str = ""
    """Folder of the results; empty: one of these settings in evaluations/, in the run's folder or in this one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("n", self.n is None or self.n >= 0, "0 or more")
        self.require(
            "temperature", self.temperature is None or self.temperature > 0, "a number above 0"
        )
        is_table = isinstance(self.template_kwargs, dict)
        self.require(
            "chat_template_kwargs",
            is_table,
            """a JSON object, such as '{"enable_thinking": false}'""",
        )
        self.require(
            "num_processes", self.num_processes is None or self.num_processes >= 0, "0 or more"
        )

    @property
    def template_kwargs(self) -> Any:
        """The variables of the chat template; None if they are no JSON."""
        try:
            return json.loads(self.chat_template_kwargs or "{}")
        except ValueError:
            return None
