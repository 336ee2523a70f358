"""Arguments as short texts."""
