"""Divide the devices between policy generation and generative rewards."""
