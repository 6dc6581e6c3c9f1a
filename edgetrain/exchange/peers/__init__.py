"""Members that connect to each other: who they are, listening, dialling, and hosting a reducer."""
