"""Reinforcement learning of diffusion and flow-matching models."""
