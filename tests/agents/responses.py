"""The SDK of OpenAI by Responses: a stream, calls of a tool, and a conversation that the endpoint remembers.

gcore-llm train --rollout.agent.run tests/agents/responses.py:agent
"""

import re
from typing import Any

from openai import AsyncOpenAI

from gcore_agents import AgentTask

PARAMETERS = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
CALC: Any = {
    "type": "function",
    "strict": False,
    "name": "calc",
    "description": "Works out a sum.",
    "parameters": PARAMETERS,
}


def calc(text: str) -> str:
    return str(sum(int(term) for term in re.findall(r"[+-]?\d+", text)))


async def agent(task: AgentTask) -> float:
    """Answer a question with the tool: as long answers are better."""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        async with client.responses.stream(
            model="policy", input=task.row["prompt"], tools=[CALC]
        ) as stream:
            response: Any = await stream.get_final_response()
        for _ in range(2):
            results: list[Any] = []
            for item in response.output:
                if item.type == "function_call":
                    result = {"call_id": item.call_id, "output": calc(item.arguments)}
                    results.append({"type": "function_call_output", **result})
            if not results:
                break
            response = await client.responses.create(
                model="policy", input=results, previous_response_id=response.id, tools=[CALC]
            )
    return len(response.output_text) / 10
