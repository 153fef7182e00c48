"""Plans of runs before they are started: parameters, passes and memory, from the shapes of a pipeline alone."""
