"""Rewards of images, and the image processor of vision-language models."""
