"""One task of an environment of verifiers, by its id; the rewards become those of the session.

    gcore-llm train --rollout.agent.run "command: PYTHON tests/agents/verifiers_task.py sums-taskset"

PYTHON has verifiers and the environment. A row's "task" is the number of its task.
"""
# pyright: reportMissingImports=false

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

import verifiers.v1 as vf

URL = os.environ["OPENAI_BASE_URL"]


def add_reward(name: str, value: float) -> None:
    url = URL.removesuffix("/v1") + "/session/reward"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"name": name, "value": value}).encode()
    urllib.request.urlopen(urllib.request.Request(url, body, headers))


async def main(taskset_id: str, number: int) -> None:
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, "max_turns": 4}
    config = vf.resolve_env_config({"taskset": {"id": taskset_id}, "agent": agent})
    environment = vf.load_environment(config)
    [task] = environment.taskset.include(idx=[str(number)])
    client = vf.EvalClientConfig(base_url=URL, api_key_var="OPENAI_API_KEY")
    context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
    async with environment.serving():
        episode = await environment.run_episode(task, context)
    for trace in episode.traces:
        for error in trace.errors:
            raise SystemExit(f"{error.type}: {error.message}")
        for name, reward in trace.rewards.items():
            add_reward(name, reward.value)


row = json.loads(Path(os.environ["GCORE_ROW"]).read_text())
asyncio.run(main(sys.argv[1], row["task"]))
