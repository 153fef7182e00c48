"""Built-in losses of finished images, a file for each; `gcore_trainer.diffusion.losses` has their interface."""
