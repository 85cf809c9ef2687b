"""``ort-zero profile``: what a step of a script takes in ONNX Runtime and in PyTorch, part by part."""
