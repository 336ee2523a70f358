"""One module for each entrance."""
