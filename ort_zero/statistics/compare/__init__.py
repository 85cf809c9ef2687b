"""Compare the statistics of two runs and name the first divergence, without torch and onnxruntime."""
