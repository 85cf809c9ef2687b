"""Finds which activations to compute again in the backward so that a step fits a memory budget."""
