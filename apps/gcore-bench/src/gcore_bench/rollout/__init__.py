"""Generation, new weights and sandboxed programs under gcore-rollout, beside bare vLLM and transformers."""
