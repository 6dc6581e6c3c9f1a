"""A member's half of the protocol: its link to the hub, and its checkpoint."""
