"""Adapt the package to the versions of torch, DeepSpeed and onnxruntime; README.md lists each reason."""
