"""What `vllm serve` needs beside vLLM to take new weights on CPU; its own processes import it."""

from typing import Any

from gcore_rollout.engines.vllm.process import repack_head


class TiedHeadWorker:
    """Methods for vLLM's workers.

    ``vllm serve --worker-extension-cls gcore_rollout.TiedHeadWorker`` adds them.
    """

    model_runner: Any

    def repack_tied_head(self) -> None:
        """After weights were loaded: `VLLMServerEngine` calls this by its name."""
        repack_head(self.model_runner.get_model())
