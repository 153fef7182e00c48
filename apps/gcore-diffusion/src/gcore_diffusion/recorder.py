"""Recording of an image model's run: the grids of images of its evaluations."""

from gcore_diffusion.modality import Job
from gcore_diffusion.sampling.evaluate import Evaluation
from gcore_diffusion.sampling.grids import write_grid
from gcore_runs.loop.recorder import BaseRunRecorder


class RunRecorder(BaseRunRecorder[Job, Evaluation]):
    """See `BaseRunRecorder`."""

    def show_evaluation(self, step: int, evaluation: Evaluation) -> dict[str, float]:
        """See `BaseRunRecorder.show_evaluation`."""
        metrics = evaluation.metrics()
        picture = self.run.samples / f"step-{step:06}.png"
        write_grid(picture, evaluation.images, evaluation.prompts, per_prompt=self.job.config.rollout.eval_n)
        names = {"val/score/mean": "reward", "val/held_out/mean": "reward not trained on", "val/accuracy": "accuracy"}
        shown = ", ".join(f"{label} {metrics[name]:.3f}" for name, label in names.items() if name in metrics)
        self.display.say(f"step {step}: held-out images: {shown}")
        return metrics

    def show_step(self, step: int, metrics: dict[str, float]) -> None:
        """See `BaseRunRecorder.show_step`."""
        cells = [
            *(
                (label, f"{metrics[name]:.3f}")
                for label, name in (("reward", "critic/score/mean"), ("not trained on", "held_out/score/mean"))
                if name in metrics
            ),
            ("accepted", f"{metrics.get('sampling/acceptance', 0.0):.0%}"),
            ("images/s", f"{metrics.get('perf/throughput', 0.0):,.1f}"),
            ("step", f"{metrics['timing_s/step']:.2f} s"),
            *((s, f"{metrics.get(f'timing_s/{s}', 0.0):.2f} s") for s in ("gen", "reward", "prepare", "train", "sync")),
        ]
        self.display.progressed(step, cells)
