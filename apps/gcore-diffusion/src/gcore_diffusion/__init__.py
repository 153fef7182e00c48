"""RLHF of diffusion and flow-matching models: the app."""
