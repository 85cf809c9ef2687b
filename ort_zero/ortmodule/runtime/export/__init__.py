"""Traces the user's module and exports it to ONNX."""
