"""Engines that other processes run."""
