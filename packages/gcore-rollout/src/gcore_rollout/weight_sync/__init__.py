"""Forms in which new weights travel from a trainer to an engine; each ends in the names and tensors of an update."""
