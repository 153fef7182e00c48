"""The APIs that agents speak: each reads a call and writes its reply."""
