"""The engine of images: pipelines of diffusers."""
