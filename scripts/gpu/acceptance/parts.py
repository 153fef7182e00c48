"""The parts of the acceptance run: their names, their functions and their time limits. Nothing heavy is imported."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part, which a process of its own runs."""

    number: int
    name: str
    function: str
    """MODULE:FUNCTION in this package; it is called with a `Trial`."""
    limit_s: float
    """Most seconds that it may take."""


PARTS = (
    Part(number=1, name="tests/gpu", function="gpu_tests:run_tests", limit_s=420),
    Part(number=2, name="20 new shapes", function="training:new_shapes", limit_s=180),
    Part(number=3, name="utilisation of the peak", function="training:utilisation", limit_s=480),
    Part(number=4, name="head of 16k x 152k", function="training:head", limit_s=90),
    Part(
        number=5, name="log-probabilities of 64k tokens", function="training:log_probs", limit_s=120
    ),
    Part(number=6, name="hf engine, 256 x 512", function="rollout:generation", limit_s=240),
    Part(number=7, name="weights to another process", function="rollout:weights", limit_s=180),
    Part(number=8, name="sleep and wake", function="rollout:sleep", limit_s=180),
    Part(number=9, name="checkpoint of 18 GB", function="checkpoint:stalls", limit_s=420),
    Part(
        number=10, name="three steps of GRPO, colocated", function="grpo:three_steps", limit_s=300
    ),
    Part(number=11, name="Megatron-Core, one rank", function="megatron:steps", limit_s=180),
    Part(number=12, name="three steps of Flow-GRPO", function="diffusion:three_steps", limit_s=180),
    Part(number=13, name="swaps of 7B and 32B", function="rollout:large_swaps", limit_s=240),
    Part(number=14, name="multi", function="multi:checks", limit_s=540),
)
