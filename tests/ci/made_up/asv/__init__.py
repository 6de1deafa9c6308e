"""Stands for asv where only the plumbing around it is tested: it measures nothing."""
