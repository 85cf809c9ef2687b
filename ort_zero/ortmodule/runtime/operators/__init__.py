"""How each ATen operator enters the graph: ONNX operators, an ATen node, or a node that PyTorch runs."""
