"""Values that tests share, and files that they read: jobs, plans, records, models, strategies."""
