"""For tests: vLLM at the pace of a larger model, so that samples live until they are interrupted."""

import time
from typing import Any

from gcore_rollout import TiedHeadWorker


class SlowWorker(TiedHeadWorker):
    def slow_down(self, step_s: float) -> None:
        """Sleep before each step from now on."""
        runner = self.model_runner
        execute = runner.execute_model

        def execute_slowly(*arguments: Any, **options: Any) -> Any:
            time.sleep(step_s)
            return execute(*arguments, **options)

        runner.execute_model = execute_slowly
