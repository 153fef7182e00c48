"""An engine for processes of their own, which cannot import the module of a test."""

import time

from gcore_rollout import HFEngine

STEP_S = 0.005
"""What servers and processes sleep before a step: else samples of tiny models may be finished before an abort comes."""


class SlowEngine(HFEngine):
    def _step(self) -> None:
        time.sleep(STEP_S)
        super()._step()
