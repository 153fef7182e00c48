"""What every contender's process finds in its environment."""

QUIET: dict[str, str] = {
    # Idle OpenMP threads spin by default: with a neighbour on the cores, every contender would suffer at random.
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
}
