"""The benchmarks asv runs, inside each benchmarked environment. See README.md."""
