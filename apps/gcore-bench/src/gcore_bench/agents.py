"""`gcore-bench agents`: processor time of the endpoint of agents, whose clients are another process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from gcore_bench.harness.processes import Spec, run_child
from gcore_bench.harness.report import (
    BenchOptions,
    BenchSession,
    add_ratios,
    verdict,
)
from gcore_runs import Count

VLLM = "vllm serve"
_CONTENDERS = (VLLM, "endpoint")
_COLUMNS = {
    "CPU ms a call": "total_ms .3f",
    "of vLLM's": "total_ms_ratio x",
    "besides tokenization": "call_ms .3f",
}
_NOTE = (
    "CPU ms: of the server's process, clients being another one. The endpoint has a sampler that answers at once; "
    "vllm serve is a plain one on this CPU, whose engine is another process and samples one token a call."
)


@dataclass(frozen=True, kw_only=True)
class AgentsOptions(BenchOptions):
    """Measure processor time of calls to the endpoint of agents, against vLLM's server on a CPU."""

    sessions: Count = 256
    """Sessions of each round."""
    at_once: Count = 256
    """Sessions at once, each with a connection of its own."""
    calls: Count = 4
    """Calls of a session; each continues the one before it."""
    message_words: Count = 160
    """Words of a message, of five characters, each of which is a token; the system message has five times as many."""
    tools: Count = 4
    """Tools that each call announces."""

    QUICK: ClassVar[Mapping[str, Any]] = {
        "rounds": 1,
        "sessions": 16,
        "at_once": 8,
    }


def run(options: AgentsOptions, session: BenchSession) -> None:
    """Measure and print processor time of calls."""
    rounds = session.start_rounds("calls")
    for turn in rounds.turns(_CONTENDERS):
        spec = Spec(
            work="gcore_bench.contenders.agent_servers",
            contender=turn.contender,
            folder=session.folder,
            options=options,
        )
        figures, _ = run_child(spec)
        turn.done(figures, "{total_ms:.3f} CPU ms a call")
    rows = rounds.summarise()
    add_ratios(rows, rounds.runs, VLLM, "total_ms")
    is_met = rows["endpoint"]["call_ms"] <= 1
    line = (
        f"aim: the endpoint takes at most 1 CPU ms a call besides tokenization: {verdict(is_met)}"
    )
    session.report("calls of agents", _COLUMNS, rows, rounds.runs, lines=[line, _NOTE])
