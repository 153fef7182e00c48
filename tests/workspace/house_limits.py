"""Where the house rules do not hold yet, as `house_measures.py` prints it. Numbers only fall."""

CYCLES: list[tuple[str, ...]] = []
FULL_FOLDERS: dict[str, int] = {}
LONG_FILES: dict[str, int] = {}
DEEP_IMPORTS: dict[str, int] = {"gcore-bench": 15, "gcore-diffusion": 0, "gcore-llm": 2, "gcore-runs": 0}
DIALECT: dict[str, int] = {
    "repository": 0,
    "gcore-bench": 0,
    "gcore-diffusion": 0,
    "gcore-llm": 25,
    "gcore-runs": 0,
    "gcore-ckpt": 5,
    "gcore-controller": 0,
    "gcore-placement": 5,
    "gcore-rollout": 7,
    "gcore-trainer": 1,
}
FRAGMENTS: dict[str, int] = {
    "gcore-ckpt": 0,
    "gcore-controller": 9,
    "gcore-placement": 0,
    "gcore-rollout": 16,
    "gcore-trainer": 0,
    "gcore-bench": 0,
    "gcore-diffusion": 3,
    "gcore-llm": 10,
    "gcore-runs": 6,
}
TRACED_FILES: dict[str, int] = {"start": 127, "step": 105}
