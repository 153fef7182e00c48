"""`report.html` of the runs of `gcore-llm`, whose charts depend on the command that made the run."""

from gcore_runs import Kind
from gcore_runs.report.run import Signal

_GRADIENT: Signal = ("Gradient norm", "actor/grad_norm", "L2 norm")
_THROUGHPUT: Signal = ("Throughput", "perf/throughput", "tokens/s")
_UPDATE = (_GRADIENT, ("Learning rate", "actor/lr", "per update"), _THROUGHPUT)

_TRAIN = Kind(
    title="Reward per step",
    unit="mean score of the step's samples",
    name="reward",
    key="critic/score/mean",
    measure="score",
    evaluations={"greedy": "val/greedy/score/mean", "sampled": "val/sampled/score/mean"},
    signals=(
        ("Policy loss", "actor/pg_loss", "clipped objective, no unit"),
        _GRADIENT,
        ("Entropy of the policy", "actor/entropy", "nats per token"),
        ("KL to the sampling policy", "actor/ppo_kl", "nats per token"),
        (
            "Engine-trainer mismatch",
            "training/rollout_k3_kl",
            "nats per token, both with the same weights",
        ),
        ("Response length", "response_length/mean", "tokens"),
        ("Acceptance of sampling", "sampling/acceptance", "share of groups kept"),
        ("Waves of sampling", "sampling/waves", "waves per step"),
        _THROUGHPUT,
    ),
    has_samples=True,
    after_warmup="Before reinforcement learning",
)

_SFT = Kind(
    title="Loss per step",
    unit="cross-entropy, nats per token",
    name="loss",
    key="sft/loss",
    measure="loss",
    evaluations={"": "val/sft/loss"},
    signals=(("Entropy of the policy", "sft/entropy", "nats per token"), *_UPDATE),
    after_warmup="",
)


def _of_pairs(prefix: str, rewards: str) -> Kind:
    return Kind(
        title="Accuracy per step",
        unit="share of the step's pairs whose chosen answer has the higher reward",
        name="accuracy",
        key=f"{prefix}/accuracy",
        measure="accuracy",
        evaluations={"": f"val/{prefix}/accuracy"},
        signals=(
            ("Loss", f"{prefix}/loss", "mean of pairs, no unit"),
            ("Held-out loss", f"val/{prefix}/loss", "mean of pairs, no unit"),
            ("Margin", f"{prefix}/margin", f"chosen less rejected, {rewards}"),
            ("Chosen answers", f"{prefix}/chosen_reward", rewards),
            ("Rejected answers", f"{prefix}/rejected_reward", rewards),
            *_UPDATE,
        ),
        after_warmup="Before the pairs",
    )


KINDS: dict[str, Kind] = {
    "train": _TRAIN,
    "simulate": _TRAIN,
    "sft": _SFT,
    "reward-model": _of_pairs("rm", "reward"),
    "dpo": _of_pairs("dpo", "implicit reward"),
}
"""Kinds of runs by command."""
