"""Full trainings in a store."""

from storage.queries import launches as launch_queries
from storage.transactions import reading, writing


class Trainings:
    """Methods of `Store` for full trainings; they have the same contract."""

    start_launch = writing(launch_queries.start)
    add_window = writing(launch_queries.add_window)
    finish_launch = writing(launch_queries.finish)
    running_launches = reading(launch_queries.running)
    launches = reading(launch_queries.of_plan)
