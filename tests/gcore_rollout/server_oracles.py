"""What the tests of engines with a server share."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_engines
from engine_oracles import (
    TinyModel,
    collect,
    errors,
    make_request,
    reference_after_swap,
    until_sampled,
)
from test_engines import TOLERANCE, Subject

from gcore_rollout import Engine, RolloutError, SamplingParams

_TAKE_TOO_SHORT = {
    # Its samples may be finished before a server has got new weights: `check_update_in_mid_generation` is for servers.
    "test_update_in_mid_generation",
}

PROMISES: dict[str, Callable[..., Any]] = {
    name: test
    for name, test in vars(test_engines).items()
    if name.startswith("test_")
    and "kind" not in inspect.signature(test).parameters
    and name not in _TAKE_TOO_SHORT
}
"""The tests of what every engine promises, for a module with a fixture `subject` of its own."""


async def check_update_in_mid_generation(subject: Subject) -> None:
    """Each token carries the version that made it, over the keys and values computed until then."""
    engine, model = subject.engine, subject.model
    before = engine.weight_version
    greedy = [make_request(f"r{i}", 140, max_tokens=300, temperature=0.0) for i in range(8)]
    whole = await collect(engine, *greedy)
    requests = [r for r in greedy if len(whole[r.request_id, 0].token_ids) == 300][:3]
    assert requests
    running = asyncio.create_task(collect(engine, *requests))
    await until_sampled(engine, 25)
    after = await subject.update(model.new)
    # The same prompts as samples still running: their keys and values are of no use to these.
    late = [
        replace(r, request_id=f"late {r.request_id}", sampling=SamplingParams(max_tokens=8), n=2)
        for r in requests
    ]
    assert max(errors(model.new, late, await collect(engine, *late))) < TOLERANCE
    found = await running
    for request in requests:
        c = found[request.request_id, 0]
        num_old = int((c.weight_versions == before).sum())
        assert 8 <= num_old < len(c.token_ids)
        assert c.weight_versions.tolist() == [before] * num_old + [after] * (
            len(c.token_ids) - num_old
        )
        expected = reference_after_swap(model.old, model.new, request, c.token_ids, num_old)
        np.testing.assert_allclose(c.log_probs, expected, atol=TOLERANCE, rtol=0)


async def check_closing(connect: Callable[[], Engine], model: TinyModel) -> None:
    """Closing ends what is generated and what could be; the server can be taken over again, and is not paused."""
    engine = await asyncio.to_thread(connect)
    assert engine.weight_version == 0
    found = await collect(engine, make_request("r", 4))
    assert set(found["r", 0].weight_versions) == {0}
    running = asyncio.create_task(collect(engine, make_request("r", 4, n=20, max_tokens=400)))
    await until_sampled(engine, 5)
    await engine.pause()
    await engine.close()
    with pytest.raises(RolloutError, match="closed while generating"):
        await running
    for call in (
        collect(engine, make_request("r", 4)),
        engine.abort(),
        engine.pause(),
        engine.resume(),
        engine.sleep(),
        engine.wake(),
        engine.update_weights(model.new.state_dict().items(), version=1),
    ):
        with pytest.raises(RolloutError, match="the engine is closed: connect again"):
            await call
    await engine.close()

    again = await asyncio.to_thread(connect)
    assert again.weight_version == 0
    assert len(await collect(again, make_request("r", 4, n=2))) == 2
    await again.close()
