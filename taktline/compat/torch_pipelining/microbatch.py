"""Cut a batch into micro-batches, and merge what came out of them."""
