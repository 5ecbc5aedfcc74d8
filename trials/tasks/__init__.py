"""Tasks of the ranks: trials, profiles and trainings, with their requests and answers."""
