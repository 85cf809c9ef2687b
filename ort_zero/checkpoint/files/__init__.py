"""Bytes in files: folders, local and remote, JSON, element types, headers of safetensors."""
