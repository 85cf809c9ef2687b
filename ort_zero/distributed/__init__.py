"""What the ranks of a job tell each other: run on all, raise on all; connections beside those of training."""
