"""Load a checkpoint into an engine or an optimizer."""
