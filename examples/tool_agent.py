"""An agent of the OpenAI Agents SDK with one tool, trained as it is.

    uv run gcore-llm train --rollout.agent.run examples/tool_agent.py:agent

Nothing in the agent is of gcore but where its model is: a URL and a key.
"""

import ast
import logging
import operator
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import agents
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gcore_agents import AgentTask

OPERATORS: dict[type, Any] = {ast.Add: operator.add, ast.Sub: operator.sub}
CONNECTIONS = DefaultAsyncHttpxClient()
agents.set_tracing_disabled(True)
logging.getLogger("openai.agents").setLevel(logging.CRITICAL)  # it reports turns that are cut off


def evaluate(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
        case _:
            raise ValueError("expected numbers, + and -")


@agents.function_tool
def calc(sum: str) -> str:
    """Work out a sum, such as 7+8-3."""
    return str(evaluate(ast.parse(sum, mode="eval").body))


async def agent(task: AgentTask) -> None:
    """Answer the question of a row; the task's own reward scores the answer."""
    client = AsyncOpenAI(
        base_url=task.base_url, api_key=task.api_key, http_client=CONNECTIONS, max_retries=0
    )
    model = agents.OpenAIResponsesModel(model="policy", openai_client=client)
    calculator = agents.Agent(name="calculator", model=model, tools=[calc])
    with suppress(agents.AgentsException):  # the policy called no such tool, or did not end
        await agents.Runner.run(calculator, task.row["prompt"], max_turns=4)


def worked_turns(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the turns of a worked example, on which the embedded model is warmed up."""
    function = {"name": "calc", "arguments": {"sum": row["prompt"].removesuffix("=")}}
    call = {"type": "function", "id": "call_0", "function": function}
    return [{"tool_calls": [call]}, {"content": row["answer"]}]
