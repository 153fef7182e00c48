"""One module a library, which only that contender's process imports."""
