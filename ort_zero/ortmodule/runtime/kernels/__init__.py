"""Chooses the faster kernel for each node of a built gradient graph."""
