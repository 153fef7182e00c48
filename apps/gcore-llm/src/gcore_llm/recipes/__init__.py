"""Recipes of large models, which `gcore-llm train --recipe NAME` starts from, and the shapes of their models."""
