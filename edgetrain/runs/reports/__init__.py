"""Everything that displays run folders: tables, pictures, the live view."""
