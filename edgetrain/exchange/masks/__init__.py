"""Contributions that a hub can only add up: masks, fixed point numbers, their terms."""
