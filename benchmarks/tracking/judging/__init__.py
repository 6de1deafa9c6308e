"""From samples to verdicts: pure functions that read no files and run nothing."""
