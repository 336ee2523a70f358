"""The order of a schedule, drawn."""
