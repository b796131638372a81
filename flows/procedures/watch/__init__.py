"""What a look of watch sees, and what it does about it."""
