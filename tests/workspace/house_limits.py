"""Where the house rules do not hold yet, as `house_measures.py` prints it. Numbers only fall."""

CYCLES: list[tuple[str, ...]] = [
    (
        "gcore_bench.ckpt.contender",
        "gcore_bench.ckpt.dcp_contender",
        "gcore_bench.ckpt.gcore_contender",
        "gcore_bench.ckpt.orbax_contender",
        "gcore_bench.ckpt.safetensors_contender",
        "gcore_bench.ckpt.tensorstore_contender",
        "gcore_bench.ckpt.torch_save_contender",
    ),
    ("gcore_bench.rollout.clocked_engine", "gcore_bench.rollout.clocked_process"),
    (
        "gcore_bench.trainer.gcore_contender",
        "gcore_bench.trainer.step",
        "gcore_bench.trainer.trl_contender",
        "gcore_bench.trainer.verl_contender",
    ),
    ("gcore_ckpt.ranks.dtensor", "gcore_ckpt.ranks.shards"),
    ("gcore_ckpt.storage.local", "gcore_ckpt.storage.object_store", "gcore_ckpt.storage"),
    ("gcore_diffusion.judge", "gcore_diffusion.sampling.rewards"),
]
FULL_FOLDERS: dict[str, int] = {
    "apps/gcore-bench/src/gcore_bench/ckpt": 26,
    "apps/gcore-bench/src/gcore_bench/controller": 14,
    "apps/gcore-bench/src/gcore_bench/grpo": 19,
    "apps/gcore-bench/src/gcore_bench/rollout": 18,
    "apps/gcore-bench/src/gcore_bench/trainer": 28,
    "apps/gcore-diffusion/src/gcore_diffusion": 22,
    "apps/gcore-llm/src/gcore_llm": 37,
    "apps/gcore-llm/src/gcore_llm/simulate": 17,
    "apps/gcore-runs/src/gcore_runs": 26,
    "packages/gcore-ckpt/src/gcore_ckpt": 41,
    "packages/gcore-controller/src/gcore_controller": 14,
    "packages/gcore-placement/src/gcore_placement": 31,
    "packages/gcore-placement/src/gcore_placement/simulation": 14,
    "packages/gcore-rollout/src/gcore_rollout": 26,
    "packages/gcore-rollout/src/gcore_rollout/rewards": 19,
    "packages/gcore-rollout/src/gcore_rollout/weight_sync": 13,
    "packages/gcore-trainer/src/gcore_trainer": 35,
    "packages/gcore-trainer/src/gcore_trainer/megatron": 15,
}
LONG_FILES: dict[str, int] = {
    "apps/gcore-llm/src/gcore_llm/config.py": 461,
    "packages/gcore-rollout/src/gcore_rollout/engines/diffusion/engine.py": 448,
    "packages/gcore-rollout/src/gcore_rollout/hf_engine.py": 467,
    "packages/gcore-rollout/src/gcore_rollout/replicas.py": 474,
    "packages/gcore-rollout/src/gcore_rollout/servers/engine.py": 451,
    "packages/gcore-rollout/src/gcore_rollout/engines/vllm/": 451,
    "packages/gcore-trainer/src/gcore_trainer/packed_model.py": 483,
}
DEEP_IMPORTS: dict[str, int] = {"gcore-bench": 33, "gcore-diffusion": 30, "gcore-llm": 39, "gcore-runs": 12}
DIALECT: dict[str, int] = {
    "repository": 2,
    "gcore-bench": 99,
    "gcore-diffusion": 26,
    "gcore-llm": 166,
    "gcore-runs": 44,
    "gcore-ckpt": 35,
    "gcore-controller": 16,
    "gcore-placement": 47,
    "gcore-rollout": 268,
    "gcore-trainer": 22,
}
FRAGMENTS: dict[str, int] = {
    "gcore-ckpt": 35,
    "gcore-controller": 24,
    "gcore-placement": 124,
    "gcore-rollout": 150,
    "gcore-trainer": 89,
    "gcore-bench": 129,
    "gcore-diffusion": 40,
    "gcore-llm": 96,
    "gcore-runs": 78,
}
TRACED_FILES: dict[str, int] = {"start": 127, "step": 90}
