"""Read and write files: local and remote folders, JSON, dtypes, safetensors headers."""
