"""Rewards and advantages of scored responses."""
