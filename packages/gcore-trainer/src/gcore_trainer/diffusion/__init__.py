"""Reinforcement learning of diffusion and flow-matching models.

`config`, `types` and `process` are what is given, `objectives` and `losses` what is minimised; `denoiser` and `trainer`
do it. `config` imports nothing heavy.
"""
