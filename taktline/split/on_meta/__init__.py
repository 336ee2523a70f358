"""Models that are built without memory for their tensors, and get values stage by stage."""
