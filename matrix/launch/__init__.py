"""How the processes of an attempt start and die."""
