"""Programs that act as agents: functions in this process, and commands in their own."""

import asyncio
import contextvars
import inspect
import json
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

from gcore_agents.command_guard import (
    KILL_S,
    POLL_S,
    find_processes,
    kill_processes,
    row_variable,
    signal_processes,
    start_guard,
)
from gcore_agents.errors import AgentFailedError
from gcore_agents.session import Session, SessionReward

_MAX_SHOWN = 2_000
"""Most characters of an agent's own error, or of what a command has printed, in an error."""
AgentResult: TypeAlias = float | Mapping[str, float] | Sequence[SessionReward] | None
"""The reward of a session, several by name, or any, such as of single agents; None: the agent does not score it."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """The input of an agent: a row to work on, and the URL and key of its model.

    Example:
        >>> async def agent(task: AgentTask) -> float:
        ...     client = openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key)
        ...     question = {"role": "user", "content": task.row["question"]}
        ...     reply = await client.chat.completions.create(model="policy", messages=[question])
        ...     return float(reply.choices[0].message.content == task.row["answer"])
        >>> inspect.iscoroutinefunction(agent)
        True
    """

    row: Mapping[str, Any]
    """The row of the data set."""
    base_url: str
    """Base URL of OpenAI's API; it ends with /v1."""
    api_key: str = field(repr=False)
    """The session's key."""
    session: Session
    """For rewards of turns and agents: ``session.add_reward(SessionReward(value=..., response_id=..., agent=...))``."""


AgentFunction: TypeAlias = Callable[[AgentTask], Awaitable[AgentResult] | AgentResult]


async def run_function(function: AgentFunction, task: AgentTask, *, timeout_s: float) -> None:
    """Run an agent's function to its end, and add the rewards that it returns to the session.

    A function that is no coroutine runs in a thread of its own. The thread cannot be ended: after ``timeout_s`` its
    session is closed, so that its next call fails. This process does not wait for it when it ends.

    Raises:
        AgentFailedError: the function raised an error, took too long, or returned no reward.
    """
    name = getattr(function, "__name__", "agent")
    result: Any
    try:
        async with task.session.clock.limit(timeout_s):
            if inspect.iscoroutinefunction(function):
                # In a task of its own: it may cancel the one that it runs in.
                result = await asyncio.ensure_future(function(task))
            else:
                result = await _run_in_thread(function, task)
                if inspect.isawaitable(result):
                    result = await result
        for reward in _list_rewards(result):
            task.session.add_reward(reward)
    except TimeoutError:
        raise AgentFailedError(f"{name} took longer than {timeout_s:g} s") from None
    except (Exception, SystemExit) as error:
        text = str(error)[:_MAX_SHOWN]
        raise AgentFailedError(f"{name}: {type(error).__name__}: {text}") from error
    except asyncio.CancelledError:
        this_task = asyncio.current_task()
        if this_task is not None and this_task.cancelling():
            raise
        raise AgentFailedError(f"{name} cancelled itself") from None
    finally:
        task.session.close()


async def _run_in_thread(function: AgentFunction, task: AgentTask) -> Any:
    """Run a function in a new thread. The threads of asyncio are few, and a process waits for them at its end."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            result = context.run(function, task)
        except StopIteration as error:
            # A future does not take it.
            done.set_exception(RuntimeError(f"StopIteration: {error}"))
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(result)

    Thread(target=run, name=f"agent {task.session.session_id}", daemon=True).start()
    return await asyncio.wrap_future(done)


def _list_rewards(result: Any) -> list[SessionReward]:
    """Return the rewards that an agent's function returned."""
    if result is None:
        return []
    if isinstance(result, Mapping):
        return [SessionReward(value=value, name=name) for name, value in result.items()]
    if not isinstance(result, list | tuple):
        return [SessionReward(value=result)]
    for reward in result:
        if not isinstance(reward, SessionReward):
            raise TypeError(
                f"the function returned {reward!r:.80} in a list; expected a SessionReward"
            )
    return list(result)


async def run_command(command: str, task: AgentTask, *, timeout_s: float) -> None:
    """Run an agent's shell command in a temporary folder, to its end.

    Its environment has the URL and the key, under the names that SDKs read, and ``GCORE_ROW``, the path of a JSON file
    with the row. No other process gets these variables. The command and all that it started end with this call, also
    processes in sessions of their own, as mini-swe-agent starts them; if this process is killed, they end soon after.

    Raises:
        AgentFailedError: it took too long, or ended with another code than 0; the message has its last lines.
    """
    with tempfile.TemporaryDirectory(dir=start_guard().folder) as folder:
        row = Path(folder) / "row.json"
        row.write_text(json.dumps(dict(task.row), default=str))
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_shell(
                command,
                cwd=folder,
                env=os.environ | agent_environment(task) | {"GCORE_ROW": str(row)},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with task.session.clock.limit(timeout_s):
                code = await process.wait()
        except TimeoutError:
            raise AgentFailedError(f"{command!r} took longer than {timeout_s:g} s") from None
        finally:
            task.session.close()
            await _end_command(process, row_variable(row))
        if code:
            lines = " | ".join(log.read_text(errors="replace").splitlines()[-5:])
            raise AgentFailedError(f"{command!r} {_describe_end(code)}: {lines[-_MAX_SHOWN:]}")


def _describe_end(code: int) -> str:
    """Return how a command ended; a shell adds 128 to the number of the signal that killed its program."""
    number = -code if code < 0 else code - 128
    if number in list(signal.Signals):
        return f"was killed by {signal.Signals(number).name}"
    return f"ended with code {code}"


async def _end_command(process: asyncio.subprocess.Process, variable: str) -> None:
    """End a command and all that it started; they have some time after SIGTERM, such as to remove a container.

    ``variable`` is in the environment of each of them, as in that of no other process.
    """
    await asyncio.to_thread(signal_processes, variable, signal.SIGTERM)
    with suppress(TimeoutError):
        async with asyncio.timeout(KILL_S):
            while await asyncio.to_thread(find_processes, variable):
                await asyncio.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(kill_processes, variable)
    await process.wait()


def agent_environment(task: AgentTask) -> dict[str, str]:
    """Return the variables by which SDKs and agents find the session."""
    root = task.base_url.removesuffix("/v1")
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_BASE": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": task.api_key,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GEMINI_API_KEY": task.api_key,
        "LLM_BASE_URL": task.base_url,
        "LLM_API_KEY": task.api_key,
    }
