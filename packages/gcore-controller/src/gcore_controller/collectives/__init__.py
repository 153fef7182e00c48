"""Collectives between controllers: the protocol, its checks, and one implementation for each way to exchange values."""
