"""Kinds of engines, rewards and image rewards that are added by one registration, or by a file of the user's."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_oracles import collect, make_request

from gcore_rollout import (
    EngineKind,
    ImageRewardKind,
    ImageRewardSettings,
    RequestError,
    RewardConfigError,
    RolloutError,
    build_image_reward,
    build_reward,
    engine_factory,
    engine_kind,
    engine_names,
    evaluate_images,
    register_engine,
    register_image_reward,
    register_reward,
    reward_names,
    score,
    start_replicas,
)


class EchoEngine:
    """Keeps the arguments that it was made with."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self.options = options

    @classmethod
    def from_pretrained(cls, model: Any, **options: Any) -> "EchoEngine":
        return cls(model, **options)


def test_an_added_engine_is_made_by_name_with_the_options_that_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EngineKind, "load", lambda _: EchoEngine)
    register_engine(
        "echo", EngineKind(make="echo:EchoEngine", takes_max_model_len=False, takes_device=True)
    )
    assert "echo" in engine_names()
    assert "echo" not in engine_names(lambda kind: kind.is_server)
    made: Any = engine_factory("echo", "model", device="cpu", max_model_len=7, max_num_seqs=3)()
    assert (made.model, made.options) == ("model", {"device": "cpu", "max_num_seqs": 3})
    with pytest.raises(ValueError, match="name is 'echo'; expected one that is not registered yet"):
        register_engine("echo", EngineKind(make="echo:EchoEngine"))


def test_an_engine_of_a_users_file_is_made_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def make(model, **options):\n    return model, options\n")
    assert engine_kind(f"{file}:make").is_own
    made: Any = engine_factory(
        f"{file}:make", "model", device="cpu", max_model_len=7, dtype="float32"
    )()
    assert made == ("model", {"device": "cpu", "dtype": "float32"})
    with pytest.raises(
        RequestError, match=r"engine is 'mine'; expected hf, vllm, .* or PATH\.py:function"
    ):
        engine_kind("mine")


async def test_the_engine_of_the_docs_is_one_file(tmp_path: Path) -> None:
    """In this process, and as replicas in processes of their own."""
    page = (Path(__file__).parents[2] / "docs/how-to/engines.md").read_text()
    file = tmp_path / "my_engine.py"
    file.write_text(page.partition("```python\n")[2].partition("```")[0])
    make: Any = engine_factory(f"{file}:EchoEngine", "model", device="cpu", max_num_seqs=3)
    here = make()
    requests = [make_request(f"r{i}", 5, n=2, max_tokens=4 + i) for i in range(4)]
    pool = await start_replicas(lambda _: make, 2, num_threads=1, preload=())
    for engine in (here, pool):
        await engine.update_weights([], version=1)
        await engine.pause()
        await engine.resume()
        completions = await collect(engine, *requests)
        assert len(completions) == 8
        for request in requests:
            completion = completions[request.request_id, 1]
            assert (
                completion.token_ids.tolist()
                == [request.prompt_token_ids[-1]] * request.sampling.max_tokens
            )
            assert completion.weight_versions.tolist() == [1] * request.sampling.max_tokens
        await engine.sleep()
        await engine.wake()
        with pytest.raises(RequestError, match="expected at most 4096, which the model takes"):
            await collect(engine, make_request("long", 5, max_tokens=5000))
        await engine.close()
        with pytest.raises(RolloutError, match="closed"):
            await collect(engine, *requests)


async def test_an_added_reward_is_made_by_name() -> None:
    def length(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        return float(len(completion))

    register_reward("length", lambda: length)
    assert reward_names()[-1] == "length"
    assert await score(build_reward("length"), prompt="", completion="four", row={}) == 4.0
    with pytest.raises(
        ValueError, match="name is 'length'; expected one that is not registered yet"
    ):
        register_reward("length", lambda: length)


async def test_an_added_image_reward_is_made_by_name_with_its_settings() -> None:
    def make(settings: ImageRewardSettings) -> Any:
        def brightness(images: Any, prompts: Any, rows: Any) -> Any:
            return images.mean((1, 2, 3)) + len(settings.path)

        return brightness

    register_image_reward("mean", ImageRewardKind(make=make, path="anything"))
    reward = build_image_reward("mean", ImageRewardSettings(path="abc"), setting="reward.kind")
    images = np.full((2, 4, 4, 3), 5, np.uint8)
    assert [s.score for s in await evaluate_images(reward, images, ["", ""], [{}, {}])] == [
        8.0,
        8.0,
    ]
    with pytest.raises(
        RewardConfigError, match=r"reward\.path is not set; expected a local folder of anything"
    ):
        build_image_reward("mean", ImageRewardSettings(), setting="reward.kind")
    with pytest.raises(
        RewardConfigError, match=r"reward\.kind is 'no'; expected jpeg_.*, mean, a URL"
    ):
        build_image_reward("no", ImageRewardSettings(), setting="reward.kind")
    with pytest.raises(ValueError, match="name is 'mean'; expected one that is not registered yet"):
        register_image_reward("mean", ImageRewardKind(make=make))
