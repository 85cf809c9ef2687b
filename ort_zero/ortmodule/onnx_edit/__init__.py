"""Reads and changes ONNX graphs; knows nothing of ZeRO, recomputation or statistics."""
