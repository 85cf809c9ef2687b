"""The format of ort_zero's own checkpoints: the manifest, its schema and what must be in it."""
