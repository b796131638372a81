"""What one look of watch sees, and what watch does about it."""
