"""Provide helpers that do not depend on DeepSpeed, ONNX Runtime or the other parts of this package."""
