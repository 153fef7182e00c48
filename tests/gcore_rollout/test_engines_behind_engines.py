"""`EngineProcess`, `RayEngine`, `EngineReplicas` and `InstrumentedEngine`: all that every engine promises."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from engine_oracles import TinyModel, collect, errors, make_request
from ray import cloudpickle
from ray_cluster import ray_cluster
from server_oracles import PROMISES, check_update_in_mid_generation
from slow_hf_engine import SlowEngine
from test_engines import MAX_NUM_SEQS, TOLERANCE, Subject

from gcore_rollout import (
    EngineHandle,
    EngineProcess,
    EngineReplicas,
    HFEngine,
    InstrumentedEngine,
    RayEngine,
    WeightReferences,
)

globals().update(PROMISES)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*:FutureWarning")]


class Transparent(SlowEngine):
    """Writes the mappings in which its weights lie to a file whenever it pauses."""

    found_in: ClassVar[Path]

    async def pause(self) -> None:
        ranges: list[tuple[int, int, str]] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            start, _, end = line.partition(" ")[0].partition("-")
            ranges.append((int(start, 16), int(end, 16), line))
        pointers = [parameter.data_ptr() for parameter in self._model.parameters()]
        lines = [
            line for pointer in pointers for start, end, line in ranges if start <= pointer < end
        ]
        self.found_in.write_text("\n".join(lines))
        await super().pause()


@pytest.fixture(scope="module")
def actor(tied: TinyModel) -> Iterator[Any]:
    Transparent.found_in = tied.path / "maps"
    slow = partial(Transparent.from_pretrained, tied.path, max_num_seqs=MAX_NUM_SEQS)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # pyright: ignore[reportPrivateImportUsage]
    with ray_cluster("here"):
        yield EngineHandle.start(slow, num_threads=1)


@pytest.fixture(params=["process", "ray", "replicas", "wrapped"])
async def subject(request: pytest.FixtureRequest, tied: TinyModel) -> AsyncIterator[Subject]:
    if request.param == "ray":
        # One actor for all tests: starting one takes seconds.
        subject = Subject(await RayEngine.connect(request.getfixturevalue("actor")), tied)
        await subject.update(tied.old)
    elif request.param == "process":
        slow = partial(SlowEngine.from_pretrained, tied.path, max_num_seqs=MAX_NUM_SEQS)
        subject = Subject(await EngineProcess.start(slow, num_threads=1), tied)
    elif request.param == "wrapped":
        here = HFEngine.from_pretrained(tied.path, max_num_seqs=MAX_NUM_SEQS)
        subject = Subject(InstrumentedEngine(here, name="engine 0"), tied)
    else:
        # Together they hold as many samples as one engine does.
        replicas = [
            HFEngine.from_pretrained(tied.path, max_num_seqs=MAX_NUM_SEQS // 2) for _ in range(2)
        ]
        subject = Subject(EngineReplicas(replicas), tied, num_engines=2)
    yield subject
    await subject.engine.close()


@pytest.fixture
def either_subject(subject: Subject) -> Subject:
    """Heads of their own differ in nothing that is behind these."""
    return subject


async def test_update_in_mid_generation(subject: Subject) -> None:
    await check_update_in_mid_generation(subject)


async def test_an_engine_computes_with_weights_by_reference_where_they_lie(
    actor: Any, tied: TinyModel
) -> None:
    """For as long as it uses them, even after others have closed it."""
    engine, here = await RayEngine.connect(actor), HFEngine.from_pretrained(tied.path)
    requests = [make_request("r", 9, n=2)]
    for model in (tied.new, tied.old, tied.new):
        references = WeightReferences.put(model.state_dict().items(), bucket_size_bytes=100_000)
        version = engine.weight_version + 1
        await asyncio.gather(
            *(each.update_weights(references, version=version) for each in (engine, here))
        )
        del references
        for _ in range(3):
            WeightReferences.put([("other", torch.full((1 << 20,), float("nan")))])
        for each in (engine, here):
            assert max(errors(model, requests, await collect(each, *requests))) < TOLERANCE
        await engine.pause()
        found = Transparent.found_in.read_text().splitlines()
        await engine.resume()
        assert len(found) > 10
        assert all("plasma" in line for line in found)
    await engine.close()
