"""Everything that depends on the version of torch, DeepSpeed or onnxruntime; README.md has the table of reasons."""
