"""Helpers that know nothing of DeepSpeed, ONNX Runtime or this package's other parts."""
