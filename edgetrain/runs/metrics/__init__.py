"""The lines of a run: written, read, and added up."""
