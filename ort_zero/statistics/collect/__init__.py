"""Measure the tensors of a running model: with module hooks in PyTorch, with extra graph nodes in ONNX Runtime."""
