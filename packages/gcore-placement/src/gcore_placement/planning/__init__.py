"""Choose the placement of a job before it is launched."""
