"""The embedded model, a tiny Stable Diffusion 3 that draws coloured digits, and its reward."""
