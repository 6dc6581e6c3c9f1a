"""What a fleet could do, in closed form: nothing is simulated."""
