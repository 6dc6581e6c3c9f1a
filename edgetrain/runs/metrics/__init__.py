"""Write the lines of a run, read them back, add them up."""
