"""ZeRO-3 where PyTorch runs the model: DeepSpeed's own hook functions, rebound and run by a subscriber."""
