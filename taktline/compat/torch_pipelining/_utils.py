"""What stages and schedules share."""
