"""Attention over a packed row divided among ranks: exchanging heads (Ulysses), passing keys and values on, or both."""
