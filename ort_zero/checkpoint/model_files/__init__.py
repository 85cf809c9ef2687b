"""What makes a folder of weights a model: names, adapters, configuration, code; which tensors are written."""
