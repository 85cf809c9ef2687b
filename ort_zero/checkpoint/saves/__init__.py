"""Save an engine's shards, at once or in the background."""
