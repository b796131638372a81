"""Alerts: what a person must hear of, and who was told."""
