"""Where RLHF work should run: what sequences cost, and how to share them out evenly.

Pure and light: numpy is the only dependency, and nothing here touches a device.
"""

from gcore_placement.balance import balance
from gcore_placement.errors import PlacementError
from gcore_placement.micro_batch import micro_batches
from gcore_placement.workload import TransformerWorkload

__all__ = ["PlacementError", "TransformerWorkload", "balance", "micro_batches"]
