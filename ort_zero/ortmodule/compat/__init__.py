"""Adapt to versions of onnxruntime-training and of torch's TorchScript exporter."""
