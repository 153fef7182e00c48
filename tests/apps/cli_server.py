"""Run by `served`: forks a process of an app, `gcore_llm` or another, per request line and answers its pid.

It also forks the heavy processes that commands start; see `forks.py`. Imports are done once, so that a process takes
the time of its work alone.
"""

import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any, cast

from forks import SOCKET, Forks
from PIL import Image

from gcore_rollout import import_reasoning_gym
from gcore_rollout.engines.vllm import process
from gcore_runs.report.page import load_template

RUN = (
    "gcore_ckpt.saving.saver",
    "gcore_controller.rlhf.step",
    "gcore_runs.loop.supervisor",
    "plotly.offline",
    "rich._emoji_codes",
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "torchdata.nodes",
)
HEAVY = {
    "gcore_llm": (
        *RUN,
        "gcore_llm.finetune.run",
        "gcore_llm.forecast",
        "gcore_llm.report",
        "gcore_llm.training",
        "gcore_placement.planning.options",
        "gcore_rollout.engines.hf.engine",
        "gcore_rollout.engines.servers.client",
        "gcore_runs.data.chat_template",
        "gcore_trainer.advantages.estimators.grpo",
        "gcore_trainer.losses.policy.vanilla",
        "gcore_trainer.torch.packed_model",
        "gcore_trainer.trainer",
        "openai",
        "sentencepiece",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.encoder_decoder",
        "transformers.models.qwen3.modeling_qwen3",
    ),
    "gcore_diffusion": (
        *RUN,
        "gcore_diffusion.demo.pretraining",
        "gcore_diffusion.backend",
        "gcore_diffusion.training",
        "diffusers.models.transformers.transformer_sd3",
        "diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3",
    ),
}
VLLM = (
    "vllm.engine.arg_utils",
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""What an engine of vLLM and its ranks import, in a server whose name ends with "-vllm".

Not Ray, which reads the environment of its process when it is imported.
"""
# Processes that vLLM spawns from a fork import this file again, with arguments of their own.
APP = sys.argv[1].removesuffix("-vllm") if __name__ == "__main__" else ""


def run(argv: list[str]) -> int:
    """As the console script does it: the exit code, with what Python would print on the way out."""
    try:
        importlib.import_module(f"{APP}.cli").main(argv)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def child(folder: Path, cwd: str, argv: list[str]) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    code = run(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "code").write_text(str(code))
    os._exit(code)


def reap(commands: set[int]) -> None:
    """Forget the dead: not before the next request, so that the test that asked for them could still open them."""
    for pid in list(commands):
        ended, _ = os.waitpid(pid, os.WNOHANG)
        commands.discard(ended)


def import_vllm() -> None:
    """As its engine does, which also keeps this process as it was."""
    environment = dict(os.environ)
    process.set_environment()
    with process.keep_process_state(), process.compilation(is_off=True):
        for module in VLLM:
            importlib.import_module(module)
    # A rank that waits for a message would keep a core busy, and two of them both cores of CI's machine.
    shm_broadcast: Any = importlib.import_module(
        "vllm.distributed.device_communicators.shm_broadcast"
    )
    shm_broadcast.sched_yield = partial(time.sleep, 1e-3)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment.items() - os.environ.items())


def serve() -> None:
    # Warnings of what a fork finds imported would be seen by no test.
    warnings.simplefilter("error")
    error = warnings.filters[0]
    if APP == "gcore_llm":
        import_reasoning_gym()
    for module in HEAVY[APP]:
        importlib.import_module(module)
    # What a first run makes once for its process.
    importlib.import_module(f"{APP}.cli").parse_train(["--threads", "1"])
    load_template()
    Image.init()
    cast(list[object], warnings.filters).remove(error)
    if sys.argv[1].endswith("-vllm"):
        import_vllm()
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is pytest's to handle, which then closes stdin
    gc.freeze()
    forks = Forks(Path(os.environ[SOCKET]))
    commands: set[int] = set()
    while True:
        sources = forks.sources()
        ready, _, _ = select.select([sys.stdin, *sources], [], [])
        for source in sources:
            if source in ready:
                forks.handle(source)
        if sys.stdin in ready:
            line = sys.stdin.readline()
            if not line:
                return
            folder, cwd, argv = json.loads(line)
            reap(commands)
            pid = os.fork()
            if pid == 0:
                forks.close()
                child(Path(folder), cwd, argv)
            commands.add(pid)
            print(pid, flush=True)


if __name__ == "__main__":
    serve()
