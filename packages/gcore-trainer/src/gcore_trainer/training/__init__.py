"""The common part of trainers of all backends."""
