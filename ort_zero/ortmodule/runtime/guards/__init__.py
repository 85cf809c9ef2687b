"""Decides at every call whether a graph can be used again, or what has to be built again, and why."""
