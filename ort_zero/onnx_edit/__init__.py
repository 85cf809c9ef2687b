"""Helpers to read and change ONNX graphs."""
