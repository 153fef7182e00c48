"""Agents whose policy writes given turns, and models that have learned these turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from gcore_agents import (
    AgentServer,
    AgentTask,
    ChatEncoder,
    SampledTokens,
    Session,
    SessionBudget,
    run_command,
    run_function,
)
from gcore_llm.tiny_model import tiny_tokenizer
from gcore_rollout import load_function


@dataclass
class WrittenTurns:
    """Answers with given texts, one turn after the other; the last one again and again."""

    tokenizer: Any
    texts: Sequence[str]
    prompts: list[str] = field(default_factory=list[str])

    async def sample(
        self,
        prompt_ids: Sequence[int],
        *,
        session: str,
        seed: int,
        max_tokens: int,
        stop: Sequence[str] = (),
    ) -> SampledTokens:
        del session, seed, max_tokens
        text = self.texts[min(len(self.prompts), len(self.texts) - 1)]
        self.prompts.append(self.tokenizer.decode(prompt_ids))
        ends = [text.index(end) + len(end) for end in stop if end in text]
        text = text[: min(ends)] if ends else f"{text}<eos>"
        tokens: list[int] = self.tokenizer(text)["input_ids"]
        zeros = [0] * len(tokens)
        return SampledTokens(
            token_ids=tokens,
            log_probs=[-0.1] * len(tokens),
            weight_versions=zeros,
            finish_reason="stop",
        )


async def play(run: str, row: dict[str, Any], texts: Sequence[str]) -> Session:
    """Run an agent, given as in rollout.agent.run, whose policy writes these texts; return its session."""
    tokenizer = tiny_tokenizer(chats=True)
    session = Session(
        session_id="session",
        sampler=WrittenTurns(tokenizer, texts),
        encoder=ChatEncoder(tokenizer),
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
