"""The parameters of a Megatron-Core model as tensors of a Hugging Face model."""
