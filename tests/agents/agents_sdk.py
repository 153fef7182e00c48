"""The OpenAI Agents SDK: an agent with a tool, run at once and as a stream.

gcore-llm train --rollout.agent.run tests/agents/agents_sdk.py:agent
"""

import re
from contextlib import suppress

from agents import (
    Agent,
    AgentsException,
    OpenAIResponsesModel,
    Runner,
    TResponseInputItem,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from gcore_agents import AgentTask

set_tracing_disabled(True)


@function_tool
def calc(sum: str) -> str:
    """Work out a sum."""
    terms = [int(term) for term in re.findall(r"[+-]?\d+", sum)]
    total = 0
    for term in terms:
        total += term
    return str(total)


async def agent(task: AgentTask) -> float:
    """Answer a question with the tool, then say as a stream if the answer is sure: as long answers are better."""
    answer = ""
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        model = OpenAIResponsesModel(model="policy", openai_client=client)
        calculator = Agent(name="calculator", instructions="Be brief.", model=model, tools=[calc])
        with suppress(
            AgentsException
        ):  # the policy called a tool that there is not, or would not end
            first = await Runner.run(calculator, task.row["prompt"], max_turns=3)
            sure: TResponseInputItem = {"role": "user", "content": "sure?"}
            stream = Runner.run_streamed(calculator, [*first.to_input_list(), sure], max_turns=2)
            async for _ in stream.stream_events():
                pass
            answer = str(stream.final_output)
    return len(answer) / 10
