"""Divide the devices between policy generation and a generative reward."""
