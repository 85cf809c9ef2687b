"""Define the format of ort_zero's checkpoints: the manifest, its schema and the checks of its content."""
