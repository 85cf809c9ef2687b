"""Collect figures of a running training and write them to files and monitors."""
