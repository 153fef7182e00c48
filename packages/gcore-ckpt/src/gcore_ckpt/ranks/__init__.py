"""What each rank holds of the global tensors, and how ranks agree with each other."""
