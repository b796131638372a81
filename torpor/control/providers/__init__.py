"""Where machines come from: the seam to GPU markets and the adapters behind it."""
