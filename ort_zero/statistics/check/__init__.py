"""Check the statistics of one run: rules over the records of its steps, without torch and onnxruntime."""
