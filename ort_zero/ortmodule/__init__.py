"""ORTModule of onnxruntime-training: :mod:`.upstream` makes it run on today's torch."""
