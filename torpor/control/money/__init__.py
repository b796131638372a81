"""What rentals and storage cost, and budgets."""
