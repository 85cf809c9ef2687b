"""Reads tensors and training state of a checkpoint, and checks their bytes."""
