"""Built-in losses of a sampler's steps, a file for each; `gcore_trainer.diffusion.losses` has their interface."""
