"""A model traced with torch.export and cut between its operations."""
