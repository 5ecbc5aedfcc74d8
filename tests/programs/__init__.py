"""Programs that tests start or watch: databases, browsers, terminals, processes, storms of users."""
