"""Layouts, their memory and their seconds, and the choice among them."""
