"""The SDK of OpenAI by Chat Completions: streams, calls of a tool, and two answers at once.

gcore-llm train --rollout.agent.run tests/agents/chat_completions.py:agent
"""

import re
from typing import Any

from openai import AsyncOpenAI

from gcore_agents import AgentTask

PARAMETERS = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
CALC: Any = {
    "type": "function",
    "function": {"name": "calc", "description": "Works out a sum.", "parameters": PARAMETERS},
}


def calc(text: str) -> str:
    return str(sum(int(term) for term in re.findall(r"[+-]?\d+", text)))


async def agent(task: AgentTask) -> float:
    """Answer a question with the tool, then ask twice at once if the answer is sure: as long answers are better."""
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for _ in range(3):
            async with client.chat.completions.stream(
                model="policy", messages=messages, tools=[CALC]
            ) as stream:
                completion = await stream.get_final_completion()
            message = completion.choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = calc(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        messages.append({"role": "user", "content": "sure?"})
        reply = await client.chat.completions.create(model="policy", messages=messages, n=2)
    return sum(len(choice.message.content or "") for choice in reply.choices) / 10
