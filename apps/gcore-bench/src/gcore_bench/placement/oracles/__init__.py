"""The part oracles of the bench of placement: what other systems have published, and what the laws predict for it."""
