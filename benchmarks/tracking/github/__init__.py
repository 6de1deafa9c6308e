"""Telling GitHub what the gate said: one small client, and what is said through it."""
