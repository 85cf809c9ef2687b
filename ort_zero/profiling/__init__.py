"""Implement ``ort-zero profile``: compare the time of a script's training step in ONNX Runtime and in PyTorch."""
