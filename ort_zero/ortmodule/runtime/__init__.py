"""Runs a user's module in ONNX Runtime: exports it, builds its gradient graph, runs the session, keeps the graphs."""
