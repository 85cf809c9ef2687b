"""Compares the statistics of two runs and names the first divergence; needs neither torch nor onnxruntime."""
