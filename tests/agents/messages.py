"""The SDK of Anthropic: a stream, calls of a tool, and their results in one message.

gcore-llm train --rollout.agent.run tests/agents/messages.py:agent
"""

import re
from typing import Any

from anthropic import AsyncAnthropic

from gcore_agents import AgentTask

PARAMETERS = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
CALC: Any = {"name": "calc", "description": "Works out a sum.", "input_schema": PARAMETERS}


def calc(text: str) -> str:
    return str(sum(int(term) for term in re.findall(r"[+-]?\d+", text)))


async def agent(task: AgentTask) -> float:
    """Answer a question with the tool: as long answers are better."""
    base_url = task.base_url.removesuffix("/v1")
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    options: Any = {"model": "policy", "max_tokens": 256, "tools": [CALC]}
    async with AsyncAnthropic(base_url=base_url, api_key=task.api_key, max_retries=0) as client:
        async with client.messages.stream(messages=messages, **options) as stream:
            message: Any = await stream.get_final_message()
        for _ in range(2):
            results: list[Any] = []
            for block in message.content:
                if block.type == "tool_use":
                    result = {"tool_use_id": block.id, "content": calc(str(block.input))}
                    results.append({"type": "tool_result", **result})
            if not results:
                break
            messages.append({"role": "assistant", "content": message.content})
            messages.append({"role": "user", "content": results})
            message = await client.messages.create(messages=messages, **options)
    return sum(len(block.text) for block in message.content if block.type == "text") / 10
