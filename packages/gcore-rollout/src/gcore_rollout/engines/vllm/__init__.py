"""The `vllm` engine: vLLM in this process."""
