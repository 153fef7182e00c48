"""Responses of several turns."""
