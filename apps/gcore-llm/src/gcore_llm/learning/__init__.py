"""Preparation and training: advantages, micro-batches, and the models of a training rank."""
