"""The `hf` engine: transformers models, continuously batched."""
