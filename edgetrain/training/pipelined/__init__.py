"""A pipeline over members: its plan, what a stage computes, and its processes."""
