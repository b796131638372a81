"""Alerts: what a person must be told of, and who was told."""
