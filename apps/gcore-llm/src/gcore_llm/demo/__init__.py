"""The embedded model and its warm-up by worked examples."""
