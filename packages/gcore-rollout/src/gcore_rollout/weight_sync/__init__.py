"""The transport of new weights to engines, and their check there."""
