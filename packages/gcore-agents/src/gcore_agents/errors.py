"""The errors of this package."""


class AgentsError(Exception):
    """Base of this package's errors."""


class MessageError(AgentsError, ValueError):
    """Messages are malformed, or the chat template refuses them, or cannot continue a conversation with them."""


class AgentFailedError(AgentsError):
    """An agent or an environment failed, did not answer in time, or its messages cannot be answered."""


class SamplerError(AgentsError):
    """An engine's server refused a prompt, could not be reached, or did not report the tokens of a turn."""


class CallError(AgentsError):
    """A call of the endpoint cannot be answered: an HTTP ``status`` of 400 or above, and the field at fault.

    ``code`` is the error's name in OpenAI's API, such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, status: int = 400, field: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code
