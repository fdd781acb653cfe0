"""The two benchmarks: their plans, jobs and where these run, their records, scores and tables."""
