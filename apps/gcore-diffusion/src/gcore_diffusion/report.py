"""`report.html` of the runs of `gcore-diffusion`."""

from pathlib import Path

from gcore_runs.report import Kind, render_report

_DIFFUSION = Kind(
    title="Reward per step",
    unit="mean score of the step's images; marks: images of held-out prompts, made without noise",
    name="reward",
    key="critic/score/mean",
    measure="reward",
    evaluations={"trained on": "val/score/mean", "not trained on": "val/held_out/mean"},
    signals=(
        ("Reward not trained on", "held_out/score/mean", "mean score of some of the step's images"),
        ("Held-out accuracy", "val/accuracy", "share, by a classifier that is not trained on"),
        ("KL to the reference", "actor/kl_loss", "nats per dimension"),
        ("Policy loss", "actor/pg_loss", "clipped objective, no unit"),
        ("Preference loss", "actor/dpo_loss", "mean of pairs, no unit"),
        ("Clipped", "actor/pg_clipfrac", "share of steps whose ratio the clip cuts"),
        ("KL to the sampling policy", "actor/ppo_kl", "nats per dimension"),
        ("Engine-trainer mismatch", "training/rollout_ratio_dev", "mean distance of the ratio from 1 before an update"),
        ("Gradient norm", "actor/grad_norm", "L2 norm"),
        ("Spread of scores", "critic/score/std", "standard deviation"),
        ("Acceptance of sampling", "sampling/acceptance", "share of groups kept"),
        ("Throughput", "perf/throughput", "images/s"),
    ),
    throughput_unit="images/s",
    has_pictures=True,
    after_warmup="",
)


def write_report(run_dir: Path) -> Path:
    """Write a run's ``report.html``; see `render_report`."""
    return render_report(run_dir, {"diffusion": _DIFFUSION, "train": _DIFFUSION})
