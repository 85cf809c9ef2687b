"""Run ZeRO-3 for models in PyTorch: DeepSpeed's own hook functions, rebound and called by a subscriber."""
