"""Commands on what the database holds: plans, studies, notes, reports, and the database itself."""
