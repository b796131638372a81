"""Where machines come from: what each market must do, and an adapter for each."""
