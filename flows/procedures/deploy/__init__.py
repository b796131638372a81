"""The deploy of one stack on one machine."""
