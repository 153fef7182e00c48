"""Small clients of the APIs that agents speak: they write bodies, and read replies and streams."""
