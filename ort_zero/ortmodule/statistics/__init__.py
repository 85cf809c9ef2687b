"""Show values of a graph to the subscribers of a model."""
