"""Numbers of a run: metrics.jsonl, TensorBoard and Prometheus."""
