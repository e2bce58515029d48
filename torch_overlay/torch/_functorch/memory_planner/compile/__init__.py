"""Compiles a joint graph by a plan, learns what it holds, and tries another."""
