"""Verify, list and compare checkpoints."""
