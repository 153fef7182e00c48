"""How many messages 64 controllers exchange with 128 engines, in simulated time; `-s` prints them."""

import asyncio
import time
from typing import Any

from gcore_controller import VirtualTimeLoop
from gcore_rollout import EngineStats
from gcore_rollout.engines.remote.client import RemoteEngine
from gcore_rollout.engines.remote.session import BEAT_INTERVAL_S, EngineSession, RemoteCall

NUM_CONTROLLERS = 64
NUM_ENGINES = 128
DURATION_S = 4


class SteppingEngine:
    """An engine that is always busy, and samples a token every 20 ms of the event loop's time."""

    def stats(self) -> EngineStats:
        tokens = int(asyncio.get_running_loop().time() * 50)
        return EngineStats(
            prompt_tokens=8,
            completion_tokens=tokens,
            num_running=4,
            num_waiting=0,
            weight_version=0,
        )


class Client(RemoteEngine[Any, Any]):
    """A controller's client of an engine in the same process."""

    _HOW_TO_OPEN = ""

    def __init__(self, engine: SteppingEngine) -> None:
        super().__init__(0, heartbeat_timeout_s=120.0)
        self.num_messages = 0
        self.session = EngineSession(self._receive, lambda source: source)
        self.session.engine = engine

    def _send(self, call_id: int, message: Any) -> None:
        self.num_messages += 1
        assert message is None or isinstance(message, RemoteCall)
        self.session.take(call_id, message)

    def _receive(self, message: Any) -> None:
        self.num_messages += 1
        self._take(message)

    def _end_silent(self, reason: str) -> None:
        raise AssertionError(reason)


async def simulate() -> tuple[int, int, list[int]]:
    """Return the messages of a few seconds, those of one reading by all, and the tokens that it and the next saw."""
    clients: list[Client] = []
    beats: list[asyncio.Task[None]] = []
    for _ in range(NUM_ENGINES):
        engine = SteppingEngine()
        for _ in range(NUM_CONTROLLERS):
            client = Client(engine)
            clients.append(client)
            beats.append(asyncio.create_task(client.session.beat(BEAT_INTERVAL_S)))
    await asyncio.sleep(DURATION_S - 0.5)
    num_unasked = sum(client.num_messages for client in clients)
    for client in clients:
        client.stats()
    await asyncio.sleep(0.1)
    num_asked = sum(client.num_messages for client in clients) - num_unasked
    tokens = [client.stats().completion_tokens for client in clients]
    for beat in beats:
        beat.cancel()
    await asyncio.gather(*beats, return_exceptions=True)
    return num_unasked, num_asked, tokens


def test_engines_report_every_second_and_on_demand() -> None:
    start_s = time.process_time()
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        num_unasked, num_asked, tokens = runner.run(simulate())
    cpu_s = time.process_time() - start_s
    num_pairs = NUM_CONTROLLERS * NUM_ENGINES
    print(
        f"{num_unasked:,} messages in {DURATION_S - 0.5} s, {num_asked:,} of a reading, {cpu_s:.1f} s of CPU"
    )
    assert num_unasked == num_pairs * DURATION_S
    assert num_asked == 2 * num_pairs
    # As of the report that the first reading asked for, at most 20 ms later.
    assert set(tokens) <= {(DURATION_S * 50 - 25), (DURATION_S * 50 - 24)}
