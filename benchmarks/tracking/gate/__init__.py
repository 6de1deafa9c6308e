"""The command `gate`, and all around a verdict: what is compared, run again, explained, written."""
