"""Keeps exported graphs on disk, so that the next run of a script needs no export."""
