"""A run while it trains: what is known of each member, and its table on a terminal."""
