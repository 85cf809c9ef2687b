"""Figures of a running training, for files and monitors that somebody looks at every day."""
