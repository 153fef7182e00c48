"""`EngineProcess` and `EngineReplicas`: all that every engine promises."""

from collections.abc import AsyncIterator
from functools import partial

import pytest
from engine_oracles import TinyModel
from server_oracles import PROMISES, check_update_in_mid_generation
from slow_hf_engine import SlowEngine
from test_engines import MAX_NUM_SEQS, Subject

from gcore_rollout.engine_process import EngineProcess
from gcore_rollout.hf_engine import HFEngine
from gcore_rollout.replicas import EngineReplicas

globals().update(PROMISES)


@pytest.fixture(params=["process", "replicas"])
async def subject(request: pytest.FixtureRequest, tied: TinyModel) -> AsyncIterator[Subject]:
    if request.param == "process":
        slow = partial(SlowEngine.from_pretrained, tied.path, max_num_seqs=MAX_NUM_SEQS)
        engine = await EngineProcess.start(slow, num_threads=1)
        subject = Subject(engine, tied)
    else:
        # Together they hold as many samples as one engine does.
        replicas = [HFEngine.from_pretrained(tied.path, max_num_seqs=MAX_NUM_SEQS // 2) for _ in range(2)]
        engine = EngineReplicas(replicas)
        subject = Subject(engine, tied, num_engines=2)
    yield subject
    await engine.close()


@pytest.fixture
def either_subject(subject: Subject) -> Subject:
    """Heads of their own differ in nothing that is behind these."""
    return subject


async def test_update_in_mid_generation(subject: Subject) -> None:
    await check_update_in_mid_generation(subject)
