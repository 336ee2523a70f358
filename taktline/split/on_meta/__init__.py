"""Models built without memory for their tensors, and pieces that get theirs."""
