"""A job from machine to machine."""
