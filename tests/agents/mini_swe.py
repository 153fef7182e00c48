"""mini-swe-agent on a folder: the command's own, which is temporary.

    gcore-llm train --rollout.agent.run "command: PYTHON tests/agents/mini_swe.py"

PYTHON has mini-swe-agent. LiteLLM finds the model by OPENAI_API_BASE and OPENAI_API_KEY. Its commands run on this
machine: give a policy that you do not trust a container (minisweagent.environments.docker).
"""
# pyright: reportMissingImports=false

import json
import os
import urllib.request
from pathlib import Path

os.environ["MSWEA_COST_TRACKING"] = "ignore_errors"
os.environ["MSWEA_SILENT_STARTUP"] = "1"
os.environ["MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT"] = "1"

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

row = json.loads(Path(os.environ["GCORE_ROW"]).read_text())
folder = Path("repository")
folder.mkdir()
agent = DefaultAgent(
    LitellmModel(model_name="openai/policy"),
    LocalEnvironment(cwd=str(folder), timeout=10),
    system_template="Solve the task with commands.",
    instance_template="{{task}}",
    step_limit=3,
)
agent.run(row["prompt"])
is_solved = (folder / "answer.txt").exists()
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/session/reward",
    json.dumps({"value": float(is_solved), "name": "solved"}).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
)
urllib.request.urlopen(request)
