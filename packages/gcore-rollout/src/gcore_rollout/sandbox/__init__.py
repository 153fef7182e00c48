"""Untrusted Python programs in isolated processes."""
