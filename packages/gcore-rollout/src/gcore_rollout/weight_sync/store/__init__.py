"""Versions of the weights in files or an object store."""
