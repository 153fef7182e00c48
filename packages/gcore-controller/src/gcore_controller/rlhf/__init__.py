"""The RLHF loop, generic over what is sampled and trained; `gcore_controller.rlhf.step` is the place to start."""
