"""The backward of a stage, whole or in halves."""
