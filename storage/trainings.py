"""Full trainings in a store."""

from storage.database.engine import Database
from storage.launch_speed import LaunchWindow
from storage.queries import launches
from storage.records import LaunchRecord, LaunchResult
from trials.plan import Plan


class Trainings:
    """Methods of `Store` for full trainings; they have the same contract."""

    _database: Database

    def start_launch(
        self,
        plan: Plan,
        workload_fingerprint: str,
        promised_samples_per_second: float | None,
        agent_id: str | None = None,
    ) -> LaunchRecord:
        """Record the start of a full training."""
        with self._database.transaction(write=True) as connection:
            return launches.start(connection, plan, workload_fingerprint, promised_samples_per_second, agent_id)

    def add_window(self, window: LaunchWindow) -> None:
        """Store the speed of a training over some steps, also after its end; again has no effect.

        Raise AlreadyFinished for other figures of a window that begins with the same step.
        """
        with self._database.transaction(write=True) as connection:
            launches.add_window(connection, window)

    def finish_launch(self, result: LaunchResult) -> None:
        """Record the end of a training; again has no effect. Raise AlreadyFinished for a different end."""
        with self._database.transaction(write=True) as connection:
            launches.finish(connection, result)

    def running_launches(self) -> tuple[LaunchRecord, ...]:
        """Return the trainings without a recorded end, oldest first; their agents show whether they still run."""
        with self._database.transaction() as connection:
            return launches.running(connection)

    def launches(self, plan_id: str) -> tuple[LaunchRecord, ...]:
        """Return all trainings with the plan, oldest first. Empty for an unknown plan."""
        with self._database.transaction() as connection:
            return launches.of_plan(connection, plan_id)
