"""Rows of large files and of the Hugging Face Hub, memory-mapped; and models of the Hub by name."""
