"""Agents whose policy writes given turns, and models that have learned these turns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from gcore_agents import (
    AgentServer,
    AgentTask,
    ChatEncoder,
    Session,
    SessionBudget,
    run_command,
    run_function,
)
from gcore_agents.conformance.scripted import ScriptedEngine
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import load_function


async def play(run: str, row: dict[str, Any], texts: Sequence[str]) -> Session:
    """Run an agent, given as in rollout.agent.run, whose policy writes these texts; return its session."""
    tokenizer = tiny_tokenizer(chats=True)
    encoder = ChatEncoder(tokenizer)
    turns: list[list[int]] = [tokenizer(f"{text}<eos>")["input_ids"] for text in texts]
    session = Session(
        session_id="session",
        sampler=ScriptedEngine(encoder=encoder, turns=turns),
        encoder=encoder,
        budget=SessionBudget(max_tokens=100_000),
    )
    server = AgentServer()
    await server.start()
    task = AgentTask(row=row, base_url=server.open(session), api_key=session.key, session=session)
    try:
        if run.startswith("command:"):
            await run_command(run.removeprefix("command:").strip(), task, timeout_s=300)
        else:
            function = load_function(run, setting="rollout.agent.run")
            await run_function(function, task, timeout_s=300)
    finally:
        await server.close()
    return session


def train_tiny_model(
    path: Path, *, tiny: Path, sessions: Sequence[Session], num_steps: int
) -> None:
    """Train a copy of the embedded model to write the turns of sessions; in place of the last, "7" is as likely."""
    tokenizer = tiny_tokenizer(chats=True)
    tokenizer.save_pretrained(path)
    other: list[int] = tokenizer("7<eos>")["input_ids"]
    rows: list[tuple[list[int], list[int]]] = []
    for session in sessions:
        *_, last = session.graph.turns()
        for turn in session.graph.turns():
            assert turn.parent is not None
            rows.append((turn.parent.path_tokens(), list(turn.token_ids)))
            if turn is last:
                rows.append((turn.parent.path_tokens(), other))
    width = max(len(prompt) + len(turn) for prompt, turn in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for number, (prompt, turn) in enumerate(rows):
        end = len(prompt) + len(turn)
        inputs[number, :end] = torch.tensor([*prompt, *turn])
        labels[number, len(prompt) : end] = torch.tensor(turn)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM.from_pretrained(tiny, max_position_embeddings=2048)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(num_steps):
            loss = model(input_ids=inputs, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(path)
