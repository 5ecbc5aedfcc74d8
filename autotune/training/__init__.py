"""Full trainings, with their output folder, log and changes of plan."""
