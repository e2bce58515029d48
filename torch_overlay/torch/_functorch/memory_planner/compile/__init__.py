"""Compiles a joint graph by a plan, reads what that holds, and may try another plan."""
