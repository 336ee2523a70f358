"""Programs written for torch.distributed.pipelining, unchanged."""
