"""Write the lines of a run, and read them back."""
