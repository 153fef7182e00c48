"""A reward behind a real server, which answers, refuses, dawdles and dies."""

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gcore_rollout import (
    HTTPReward,
    RetryPolicy,
    RewardConfigError,
    RewardError,
    RewardRunner,
    RewardRunnerConfig,
    RolloutError,
    Scored,
    evaluate,
)

QUICK = RetryPolicy(max_retries=2, backoff_s=0.01)


class Redirect(str):
    """An answer with a location."""


Answer = tuple[int, Any] | Redirect | None
"""Status and JSON; None: the connection is closed without a word."""


class Server:
    """A small HTTP server on a free port; ``answers`` are given in turn, the last one for ever."""

    def __init__(self, *answers: Answer, delay_s: float = 0.0) -> None:
        self.answers: list[Answer] = list(answers)
        self.delay_s = delay_s
        self.requests: list[dict[str, Any]] = []
        self.headers = ""
        self.most_at_once = self._at_once = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                self.headers = head
                length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0])
                self.requests.append(json.loads(await reader.readexactly(length)))
                self._at_once += 1
                self.most_at_once = max(self.most_at_once, self._at_once)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                await asyncio.sleep(self.delay_s)
                self._at_once -= 1
                if answer is None:
                    break
                if isinstance(answer, Redirect):
                    head = f"HTTP/1.1 307 Moved\r\nLocation: {answer}\r\nContent-Length: 0\r\n\r\n"
                    writer.write(head.encode())
                    continue
                body = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
                writer.write(
                    f"HTTP/1.1 {answer[0]} Reason\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                    + body
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(server: Server, **options: Any) -> AsyncGenerator[HTTPReward]:
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/score"
    options = {"retry": QUICK, "timeout_s": 5.0, **options}
    reward = HTTPReward(server.url, **options)
    try:
        yield reward
    finally:
        await reward.close()
        listening.close()


async def ask(reward: HTTPReward, completion: str = "c", row: Any = None) -> Scored:
    return await evaluate(reward, prompt="p", completion=completion, row=row or {"answer": 4})


async def test_request_and_answer() -> None:
    server = Server(
        (200, {"score": 0.5, "parts": {"format": 1}, "feedback": "gut"}), (200, {"score": 1})
    )
    async with serving(server, headers={"Authorization": "Bearer secret"}) as reward:
        assert await ask(reward, "c\udcff é") == Scored(
            score=0.5, parts={"format": 1.0}, feedback="gut"
        )
        assert await ask(reward) == Scored(score=1.0)
    assert server.requests[0] == {"prompt": "p", "completion": "c\udcff é", "row": {"answer": 4}}
    assert "POST /score HTTP/1.1" in server.headers
    assert "Authorization: Bearer secret" in server.headers
    assert "Content-Type: application/json" in server.headers


@pytest.mark.parametrize("failure", [(500, "oops"), (503, "busy"), (429, "slowly"), None])
async def test_what_may_pass_is_tried_again(failure: Answer) -> None:
    server = Server(failure, failure, (200, {"score": 1}))
    async with serving(server) as reward:
        assert await ask(reward) == Scored(score=1.0)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 404, 422, 302, 201])
async def test_hopeless_requests_are_not_retried_and_show_the_servers_text(status: int) -> None:
    server = Server((status, {"detail": "row has no gold"}))
    async with serving(server) as reward:
        with pytest.raises(
            RewardError, match=rf"{server.url} answered {status} Reason: .*row has no gold"
        ):
            await ask(reward)
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ((500, "x" * 9999), r"answered 500 Reason: '\"x{499}', in each of 3 attempts"),
        (None, "ServerDisconnectedError"),
    ],
)
async def test_retries_are_bounded_and_a_runner_adds_none(failure: Answer, message: str) -> None:
    server = Server(failure)
    async with serving(server) as reward:
        runner = RewardRunner(
            reward, RewardRunnerConfig(retry=RetryPolicy(max_retries=5, backoff_s=0.01))
        )
        with pytest.raises(RewardError, match=message):
            await runner.score(prompt="p", completion="c", row={})
    assert len(server.requests) == 3
    assert runner.stats().num_retries == 0


async def test_a_slow_server() -> None:
    server = Server((200, {"score": 1}), delay_s=5.0)
    async with serving(server, timeout_s=0.5) as reward:
        with pytest.raises(
            RewardError, match=r"did not answer within timeout_s=0.5, in each of 3 attempts"
        ):
            await ask(reward)
    assert len(server.requests) == 3


async def test_a_dead_server() -> None:
    async with serving(Server((200, {"score": 1}))) as reward:
        assert (await ask(reward)).score == 1.0
    with pytest.raises(RewardError, match=r"ClientConnectorError: .*, in each of 3 attempts"):
        await ask(reward)
    await reward.close()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"not json", "answered 'not json'; expected JSON with 'score'"),
        ([1.0], "expected JSON with 'score'"),
        ({"value": 1}, "expected JSON with 'score'"),
        ({"score": "high"}, "returned a score of 'high'; expected one number"),
        (b'{"score": NaN}', "returned a score of nan; expected a finite number"),
        ({"score": 1, "parts": [1]}, '"parts" to be an object'),
        ({"score": 1, "parts": {"a": "b"}}, "returned a part 'a' of 'b'; expected one number"),
        ({"score": 1, "feedback": 3}, '"feedback" a string'),
    ],
)
async def test_other_answers(body: Any, message: str) -> None:
    server = Server((200, body))
    async with serving(server) as reward:
        with pytest.raises(RewardError) as error:
            await ask(reward)
    assert message in str(error.value)
    assert len(server.requests) == 1


@pytest.mark.parametrize("value", [object(), float("nan"), {1, 2}])
async def test_rows_that_are_not_json(value: object) -> None:
    async with serving(Server((200, {"score": 1}))) as reward:
        with pytest.raises(RewardError, match="the row cannot be sent as JSON: "):
            await ask(reward, row={"value": value})


async def test_connections_are_bounded_and_waiting_costs_no_time() -> None:
    server = Server((200, {"score": 1}), delay_s=0.5)
    async with serving(
        server, max_connections=2, timeout_s=1.9, retry=RetryPolicy(max_retries=0)
    ) as reward:
        assert len(await asyncio.gather(*(ask(reward) for _ in range(8)))) == 8
    assert server.most_at_once == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: HTTPReward("localhost:80"),
            "url is 'localhost:80'; expected http://... or https://...",
        ),
        (lambda: HTTPReward("http://x", timeout_s=0), "timeout_s is 0; expected more than 0"),
        (
            lambda: HTTPReward("http://x", max_connections=0),
            "max_connections is 0; expected at least 1",
        ),
    ],
)
def test_bad_settings(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RewardConfigError, match=message):
        make()


def test_a_missing_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(RolloutError, match=r"pip install 'gcore-rollout\[http\]'"):
        HTTPReward("http://x")


async def test_an_answer_has_a_bound() -> None:
    async with serving(Server((200, b"x" * ((16 << 20) + 1)))) as reward:
        with pytest.raises(RewardError, match="answers more than 16 MB; expected a few numbers"):
            await ask(reward)


async def test_redirects_stay_on_the_host() -> None:
    """The row, and an authorization, are not for another one."""
    other = Server((200, {"score": 1}))
    async with serving(other):
        server = Server()
        async with serving(server, headers={"Authorization": "secret"}) as reward:
            server.answers = [Redirect("/score/"), (200, {"score": 0.5}), Redirect(other.url)]
            assert (await ask(reward)).score == 0.5
            assert len(server.requests) == 2
            with pytest.raises(
                RewardError, match=r"redirects to 'http://127.0.0.1:\d+/score'; expected the URL"
            ):
                await ask(reward)
    assert other.requests == []
