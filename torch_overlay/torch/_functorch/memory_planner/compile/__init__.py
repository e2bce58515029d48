"""Compiles a joint graph by a plan, reads what it holds, and may try another plan."""
