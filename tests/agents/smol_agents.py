"""smolagents: a CodeAgent, which writes Python up to a stop sequence, or a ToolCallingAgent.

    gcore-llm train --rollout.agent.run "command: PYTHON tests/agents/smol_agents.py code"

PYTHON has smolagents[openai]. A ToolCallingAgent demands a call of every turn, which sampling cannot promise: its
model has tool_choice "auto".
"""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

import json
import os
import re
import sys
from pathlib import Path

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def calc(sum: str) -> str:
    """Work out a sum.

    Args:
        sum: such as 1+2
    """
    total = 0
    for term in re.findall(r"[+-]?\d+", sum):
        total += int(term)
    return str(total)


row = json.loads(Path(os.environ["GCORE_ROW"]).read_text())
model = OpenAIModel(
    model_id="policy",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
    client_kwargs={"max_retries": 0},
    **({"tool_choice": "auto"} if sys.argv[1] == "tools" else {}),
)
if sys.argv[1] == "code":
    agent = CodeAgent(tools=[calc], model=model, max_steps=2)
else:
    agent = ToolCallingAgent(tools=[calc], model=model, max_steps=2)
print(agent.run(row["prompt"]))
