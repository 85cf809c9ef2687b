"""Measures the tensors of a running model, in PyTorch by module hooks, in ONNX Runtime by nodes that read them."""
