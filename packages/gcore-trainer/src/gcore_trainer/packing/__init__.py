"""Packed rows: samples end to end, without padding, and a shared prompt once."""
