"""Settings of data that chat templates render."""

from dataclasses import dataclass, field
from typing import Any

from gcore_runs import BaseDataConfig

_OURS = ("add_generation_prompt", "continue_final_message", "messages", "tokenize", "tools")
"""Arguments of a template that gcore gives itself."""


@dataclass(frozen=True, kw_only=True)
class ChatDataConfig(BaseDataConfig):
    """Rows of text and chat messages."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further variables of the model's chat template, wherever it is applied, such as
    --data.chat-template-kwargs.enable_thinking False."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.chat_template_kwargs.keys()
        self.require(
            "chat_template_kwargs",
            not names & set(_OURS),
            f"none of {', '.join(_OURS)}, which gcore gives",
        )
