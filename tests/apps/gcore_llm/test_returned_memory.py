"""The memory of a role that is asleep is returned to the system: measured in the processes of a run on Ray."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from command_line import Cli, Command, option_set
from process_tree import descendants

from gcore_llm.tiny_model import tiny_tokenizer

LAYERS, KV_HEADS, HEAD_DIM = 2, 8, 64
BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
NUM_TOKENS = 56
"""Tokens of each response and each verdict, which no token ends."""
NUM_SAMPLES = 8 * 4
TITLES = {"engine": "ray::EngineActor", "rank": "ray::TrainingRank"}

# Notes when the ranks train.
LOSS = """
import time
from pathlib import Path

def loss(tokens, config):
    with Path("trained").open("a") as file:
        print(time.time(), file=file)
    time.sleep(0.5)
    return -tokens.advantages * tokens.ratio
"""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A model whose weights, keys and values stand out in the memory of a process; and the bytes of its weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("wide") / "model"
    tiny_tokenizer().save_pretrained(path)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    return path, sum(p.nbytes for p in model.parameters())


@dataclass
class Watched:
    """The private memory of a run's processes over time."""

    role_of: dict[int, str] = field(default_factory=dict[int, str])
    """By process."""
    rows: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    """Time, process and bytes."""

    def sizes(self, role: str, start: float, end: float) -> list[list[int]]:
        """The sizes of each process of a role between two times, the processes in the order of their numbers."""
        pids = sorted(pid for pid, own in self.role_of.items() if own == role)
        return [
            [size for at, of, size in self.rows if of == pid and start <= at <= end] for pid in pids
        ]


@contextmanager
def watching(command: Command) -> Generator[Watched]:
    watched, is_over = Watched(), threading.Event()

    def watch() -> None:
        looked_s = 0.0
        while not is_over.wait(0.02):
            if time.monotonic() - looked_s > 1.0:
                watched.role_of |= {
                    pid: r for r, title in TITLES.items() for pid in descendants(command.pid, title)
                }
                looked_s = time.monotonic()
            for pid in watched.role_of:
                try:
                    status = Path(f"/proc/{pid}/status").read_text()
                except OSError:
                    continue  # it has just ended
                found = [
                    line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")
                ]
                watched.rows += [(time.time(), pid, int(size) << 10) for size in found]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        is_over.set()
        thread.join()


@pytest.mark.slow
def test_memory_of_what_sleeps_is_returned(
    vllm_cli: Cli, own_args: list[str], wide: tuple[Path, int]
) -> None:
    """An hf policy and a vLLM judge, on whose devices two ranks train; in the second step."""
    model, weights_bytes = wide
    (vllm_cli.cwd / "noting.py").write_text(LOSS)
    (vllm_cli.cwd / "question.txt").write_text("> {completion}")
    args = option_set(
        option_set(own_args, "--model", str(model)), "--trainer.total-training-steps", "2"
    )
    args = option_set(args, "--data.max-response-length", str(NUM_TOKENS))
    judge = {
        "engine": "vllm",
        "num-processes": "1",
        "max-response-length": str(NUM_TOKENS),
        "template": "question.txt",
        "unparsable-score": "0",
        "pattern": r"(\d)",
    }
    command = vllm_cli.start(
        *args,
        *("--reward-model.kind", "judge", "--reward-model.path", str(model)),
        *(
            text
            for name, value in judge.items()
            for text in (f"--reward-model.judge.{name}", value)
        ),
        *(
            "--algorithm.filter-groups",
            "False",
            "--actor.loss.loss-mode",
            f"{vllm_cli.cwd / 'noting.py'}:loss",
        ),
        *("--runtime", "ray", "--rollout.num-processes", "1", "--trainer.num-processes", "2"),
        *(
            "--rollout.colocated",
            "true",
            "--trainer.tensorboard",
            "False",
            "--trainer.test-freq",
            "1000",
        ),
    )
    with watching(command) as watched:
        finished = command.wait()
    assert finished.code == 0, finished
    times = sorted(float(line) for line in (vllm_cli.cwd / "trained").read_text().split())
    assert len(times) == 2 * 2
    # Each step has a micro-batch on each of the two ranks.
    training = [(times[i], times[i + 1] + 0.5) for i in (0, 2)]
    # Keys and values of all responses, or of all verdicts. The weights that the policy drops are in the object store.
    cache_bytes = NUM_SAMPLES * NUM_TOKENS * BYTES_PER_TOKEN
    # Half of the parameters, gradients and two moments; copies of what is kept are in memory all the time.
    states_bytes = 4 * weights_bytes // 2
    (_, trained), (start, end) = training
    between = {role: watched.sizes(role, trained, start) for role in TITLES}
    within = {role: watched.sizes(role, start, end) for role in TITLES}
    assert len(between["engine"]) == len(between["rank"]) == 2
    for awake, asleep in zip(between["engine"], within["engine"], strict=True):
        assert max(awake) - max(asleep) > cache_bytes
    for asleep, awake in zip(between["rank"], within["rank"], strict=True):
        assert min(awake) - min(asleep) > states_bytes
