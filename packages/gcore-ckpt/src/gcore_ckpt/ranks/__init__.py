"""The parts of global tensors that each rank holds, and the coordination of ranks."""
