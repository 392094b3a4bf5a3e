"""How a load spreads over ranks, whatever the format: what both strategies work with, and the two of them."""
