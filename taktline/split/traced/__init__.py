"""A model traced by torch.export, and cut between its operations."""
