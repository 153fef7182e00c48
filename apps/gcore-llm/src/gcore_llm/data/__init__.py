"""Prompts: files, images and reasoning-gym tasks."""
