"""`gcore-bench diffusion`: the plain loop is Flow-GRPO, and the bench runs."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console

from gcore_bench.cli import run_bench
from gcore_bench.diffusion import GCORE, LIMIT, NOISE_LEVEL, PLAIN, DiffusionOptions, Loop
from gcore_bench.harness.report import BenchError
from gcore_diffusion.config import DemoConfig
from gcore_diffusion.demo.pretraining import pretrained_pipeline
from gcore_rollout import FlowSDE, load_pipeline
from gcore_runs.loop.recorder import Display

pytestmark = pytest.mark.slow


def test_the_plain_loop_steps_as_flow_grpo_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its Gaussians are those of gcore's kernel, its loss moves weights, and its ratio begins at 1."""
    with Display(Console(quiet=True)) as display:
        model = pretrained_pipeline(
            DemoConfig(num_steps=2, cache_dir=str(tmp_path)), seed=0, display=display
        )
    loop = Loop(load_pipeline(model, dtype=torch.float32), prompts=2, n=4, seed=0)
    latents, velocity = torch.randn(5, 3, 8, 8), torch.randn(5, 3, 8, 8)
    for i in (0, 1, 4):
        mean, std = loop.gaussian(velocity, latents, i)
        expected = FlowSDE(noise_level=NOISE_LEVEL)(
            velocity, latents, loop.sigmas[i].expand(5), loop.sigmas[i + 1].expand(5)
        )
        torch.testing.assert_close(mean, expected.mean)
        torch.testing.assert_close(std.expand(5, 1, 1, 1), expected.std)
    before = [p.detach().clone() for p in loop.model.parameters()]
    ratios: list[float] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        # Of half of the images; the model's own exponents are of other sizes.
        if tensor.shape == (4,):
            ratios.append(float((real(tensor.detach()) - 1).abs().max()))
        return real(tensor)

    real = torch.exp
    monkeypatch.setattr(torch, "exp", noted)
    seconds = loop.step()
    assert ratios[0] < 1e-5
    assert seconds["step"] == pytest.approx(sum(seconds[s] for s in ("gen", "reward", "train")))
    assert any(not torch.equal(p, q) for p, q in zip(loop.model.parameters(), before, strict=True))


@pytest.mark.usefixtures("forked_diffusion_commands")
def test_bench_measures_steps(tmp_path: Path) -> None:
    options = DiffusionOptions(quick=True, json=tmp_path / "figures.json")
    run_bench("diffusion", options, Console(file=io.StringIO(), width=140))
    (loop,) = json.loads((tmp_path / "figures.json").read_text())["parts"]
    assert list(loop["rows"]) == [*PLAIN, LIMIT, *GCORE]
    for name, row in loop["rows"].items():
        num_images = 32 if name == LIMIT else 16
        assert row["images_per_s"] == pytest.approx(num_images / row["step"])
        assert row["gen"] > 0
        assert row["train"] > 0
    assert "aim: with 2 controllers at least 1.5 times" in loop["lines_below"][1]


@pytest.mark.parametrize(
    "field",
    [{"steps": 0}, {"n": 3}, {"prompts": 12}, {"prompts": 32}, {"json": Path("/nowhere/file")}],
)
def test_bad_options_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(BenchError, match=next(iter(field))):
        DiffusionOptions(**{**asdict(DiffusionOptions()), **field})  # pyright: ignore[reportArgumentType]
