"""Select the tensors of a model's folder and their names, and find the model's configuration."""
