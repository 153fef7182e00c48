"""The torch backend: transformers models in one process, or sharded by FSDP2."""
