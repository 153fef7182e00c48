"""One module an engine, which only that contender's process imports."""
