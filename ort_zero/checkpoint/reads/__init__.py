"""Read tensors and training state of a checkpoint, and check their bytes."""
