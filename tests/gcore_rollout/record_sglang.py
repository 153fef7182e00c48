"""Writes down what a real SGLang server says: python tests/gcore_rollout/record_sglang.py ENVIRONMENT/bin/python"""

import asyncio
import sys
import tempfile
from pathlib import Path

from engine_oracles import make_tiny_model
from server_processes import served_by_sglang
from sglang_exchanges import RECORDED, Recorder, run_scenario

from gcore_rollout.engines.servers.sglang import SGLangServerEngine


async def record(url: str, folder: Path) -> None:
    model = make_tiny_model(folder / "model", tie=True)
    weights_dir = folder / "weights"
    weights_dir.mkdir()
    recorder = Recorder(url)
    async with recorder.running() as proxy:
        engine = await asyncio.to_thread(SGLangServerEngine.connect, proxy, weights_dir=weights_dir)
        await run_scenario(engine, model)
    recorder.write(RECORDED)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(Path(folder) / "model", tie=True)
        with served_by_sglang(sys.argv[1], Path(folder) / "model", log=Path(folder) / "log") as url:
            asyncio.run(record(url, Path(folder)))
