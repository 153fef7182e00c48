"""From live tensors to a committed step: who writes what, staging in host memory, writing in the background."""
