"""Verifies, lists and compares checkpoints."""
