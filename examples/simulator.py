"""Compare placement strategies on a trace of work, without any device.

``uv run python examples/simulator.py`` simulates a job of 64 devices whose responses grow and whose judge is as large
as the policy, and prints a row for each strategy: seconds of a step, speed, and where device time is lost. It takes
seconds. `gcore-placement simulate` has more traces, and reads those of your own runs.
"""

from gcore_placement import (
    Comparison,
    Drift,
    EngineCosts,
    JobCosts,
    PartitionSpace,
    RoleLimits,
    Simulator,
    SwapCosts,
    TraceRecipe,
    TrainingCosts,
    compare,
)

# The work: 128 prompts a step, 16 responses each. Responses grow to four times their length, and prompts become harder.
TRACE = TraceRecipe(
    name="crossing",
    num_steps=12,
    train_batch_size=128,
    response_median=Drift(first=6000, last=1000),
    judge_median=Drift(first=200, last=4000),
    acceptance=Drift(first=0.5, last=0.5),
)

# The costs: one replica takes 4 devices, and a decoding step about 11 ms and a little for each sequence and token.
ENGINE = EngineCosts(
    devices_per_replica=4,
    max_num_seqs=256,
    decode_base_s=0.011,
    decode_per_sequence_s=4e-5,
    decode_per_context_token_s=2.7e-8,
    prefill_per_token_s=3e-5,
)
COSTS = JobCosts(
    policy=ENGINE,
    reward=ENGINE,
    training=TrainingCosts(base_s=4.0, per_token_s=5e-4, sync_s=12.0),
    swap=SwapCosts(sleep_s=10.0, wake_s=25.0, load_s=40.0),
)

# The cluster: 64 devices, each in a replica of the policy or of the judge.
SPACE = PartitionSpace(num_devices=64, roles=(RoleLimits(devices_per_replica=4),) * 2)


def main() -> Comparison:
    found = compare(TRACE.name, Simulator(TRACE.trace(), COSTS, SPACE))
    print(
        f"{'strategy':<14}{'step':>10}{'speed':>8}{'moves':>8}{'idle':>8}{'long tail':>12}{'swap':>8}"
    )
    for run in found.runs:
        speed = found["colocated"].seconds / run.seconds
        print(
            f"{run.strategy:<14}{run.step_s:>8.1f} s{speed:>8.2f}{run.num_moves:>8}{run.idle_share:>8.1%}"
            f"{run.share('long_tail'):>12.1%}{run.share('swap'):>8.1%}"
        )
    return found


if __name__ == "__main__":
    main()
