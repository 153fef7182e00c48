"""Preparation and training: micro-batches, and the models of a training rank."""
