"""One module a system, which only that contender's process imports."""
