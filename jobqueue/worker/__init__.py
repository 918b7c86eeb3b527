"""The runtime: what claims jobs, runs them and reports what became of them."""
