"""verl's contender: one driver, an actor, that gathers a DataProto from verl's own workers and dispatches it."""

from typing import Any

import numpy as np
import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch as _Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from gcore_bench.controller.workload import WARMUP_STEPS, Payload, StepFigures, check_read, checksum

# verl creates its members at import.
Dispatch: Any = _Dispatch


class _VerlWorker(Worker):
    """The work of `gcore_bench.controller.contenders.gcore.BenchWorker` in verl's API."""

    def __init__(self) -> None:
        super().__init__()
        torch.set_num_threads(1)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def make(self, data: Any) -> Any:
        """Return the features, [n, num_floats], of the samples ``index``, [n], and their metadata."""
        payload: Payload = data.meta_info["payload"]
        indices = data.batch["index"].tolist()
        features = np.empty((len(indices), payload.num_floats), np.float32)
        for row, index in zip(features, indices, strict=True):
            payload.features(index, out=row)
        responses = [payload.response(index) for index in indices]
        columns = {name: torch.tensor([response[name] for response in responses]) for name in ("length", "reward")}
        columns |= {"index": data.batch["index"], "features": torch.from_numpy(features)}
        columns["checksum"] = torch.tensor([checksum(row) for row in features])
        return DataProto.from_dict(columns)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def read(self, data: Any) -> Any:
        """Return the index and the checksum of each sample."""
        checksums = [checksum(row) for row in data.batch["features"].numpy()]
        return DataProto.from_dict({"index": data.batch["index"], "checksum": torch.tensor(checksums)})


class VerlDriver:
    """verl's single controller over a hybrid worker group, which generates and trains."""

    def __init__(self, num_workers: int) -> None:
        torch.set_num_threads(1)
        self._num_workers = num_workers
        worker: Any = ray.remote(_VerlWorker)
        pool = RayResourcePool([num_workers], use_gpu=False)
        self._workers: Any = RayWorkerGroup(pool, RayClassWithInitArgs(worker))

    def run(self, payload: Payload, num_steps: int) -> StepFigures:
        """Make steps, after the warm-up steps."""
        figures = StepFigures()
        with figures.watched():
            for _ in range(WARMUP_STEPS + num_steps):
                with figures.step():
                    self._step(payload)
        return figures

    def _step(self, payload: Payload) -> None:
        indices: Any = torch.arange(payload.num_samples)
        batch = self._workers.make(DataProto.from_dict({"index": indices}, meta_info={"payload": payload}))
        batch.batch["advantage"] = batch.batch["reward"] - batch.batch["reward"].mean()
        lengths = batch.batch["length"].tolist()
        parts: Any = get_seqlen_balanced_partitions(lengths, k_partitions=self._num_workers, equal_size=True)
        batch.reorder(torch.tensor([index for part in parts for index in part]))
        check_read(dict(_checksums(batch)), _checksums(self._workers.read(batch)))


def _checksums(data: Any) -> list[tuple[int, int]]:
    return list(zip(data.batch["index"].tolist(), data.batch["checksum"].tolist(), strict=True))
