"""The store, compared with a simple model of it, under random sequences of calls."""

from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, ClassVar
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from storage.errors import AlreadyFinished, ResourceHeld, Superseded
from storage.records import AbandonedTrial, FinishedTrial, LaunchResult, RunningTrial, TrialResult
from storage.store import open_store
from tests.contracts.conftest import on_both_databases
from tests.values.parameters import examples
from tests.values.storage import NOON, OUTCOMES, PADDED_PLAN, best_of, changed, packed_plan, result_of
from trials.plan import Plan

SETTINGS = settings(
    max_examples=examples(10),
    stateful_step_count=25,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
PLANS = (packed_plan(3), packed_plan(9), PADDED_PLAN)


@dataclass
class Trial:
    study: str
    number: int
    plan: Plan
    role: str
    agent: str | None
    state: str = "running"
    result: TrialResult | None = None
    late: bool = False


@dataclass
class Study:
    leader: str | None = None
    best: Any = None
    trials: list[str] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """Calls of every kind that changes something, in any order."""

    url: ClassVar[str]
    studies_made: Any = Bundle("studies")
    trials_made: Any = Bundle("trials")
    agents_made: Any = Bundle("agents")
    launches_made: Any = Bundle("launches")

    def __init__(self) -> None:
        super().__init__()
        self.store = open_store(self.url)
        self.workload = changed("data.lengths_digest", uuid4().hex)  # of this example alone
        self.fingerprint = self.store.add_workload(self.workload)
        self.studies: dict[str, Study] = {}
        self.trials: dict[str, Trial] = {}
        self.agents: dict[str, bool] = {}
        self.held: dict[str, str] = {}
        self.launches: dict[str, LaunchResult | None] = {}

    def teardown(self) -> None:
        self.store.close()

    # --- agents ---

    @rule(target=agents_made)
    def add_agent(self) -> str:
        agent = self.store.add_agent("a host", "1 1").id
        self.agents[agent] = True
        return agent

    @rule(agent=agents_made)
    def end_agent(self, agent: str) -> None:
        self.store.end_agent(agent)
        self._end(agent)

    @rule(agent=agents_made)
    def beat(self, agent: str) -> None:
        present = self.store.beat(agent)
        assert {each for each in self.agents if each in present} == {a for a, lives in self.agents.items() if lives}

    @rule(agent=agents_made, names=st.sets(st.sampled_from("abc"), min_size=1), gone=st.booleans())
    def take(self, agent: str, names: set[str], gone: bool) -> None:
        wanted = {f"{self.fingerprint}-{name}" for name in names}
        holders = {self.held[each] for each in wanted if each in self.held} - {agent}
        try:
            self.store.take_resources(agent, sorted(wanted), gone=holders if gone else ())
        except Superseded:
            assert not self.agents[agent]
        except ResourceHeld:
            assert holders
            assert not gone
        else:
            assert self.agents[agent]
            assert gone or not holders
            for holder in holders:
                self._end(holder)
            self.held |= dict.fromkeys(wanted, agent)

    def _end(self, agent: str) -> None:
        self.agents[agent] = False
        self.held = {resource: holder for resource, holder in self.held.items() if holder != agent}

    # --- studies ---

    @rule(target=studies_made, seed=st.integers(0, 2**31 - 1))
    def create_study(self, seed: int) -> str:
        study = self.store.create_study(self.fingerprint, {"seed": seed}, seed)
        assert self.store.studies()[0] == study
        self.studies[study.id] = Study()
        return study.id

    @rule(study=studies_made, agent=agents_made, others=st.booleans())
    def lead(self, study: str, agent: str, others: bool) -> None:
        before = self.studies[study].leader
        if not self.agents[agent]:
            with pytest.raises(Superseded):
                self.store.lead_study(study, agent)
            return
        self.store.lead_study(study, agent, instead_of=before if others else None)
        if before is None or others:
            self.studies[study].leader = agent

    @rule(study=studies_made, agent=agents_made, plan=st.sampled_from(PLANS))
    def conclude(self, study: str, agent: str, plan: Plan) -> None:
        known = self.studies[study]
        best = best_of(study, workload=self.workload, plan=plan)
        done = self.store.conclude_study(best, "{}", agent)
        assert done == (known.best is None and known.leader == agent)
        known.best = best if done else known.best

    # --- trials ---

    @rule(
        target=trials_made,
        study=studies_made,
        plan=st.sampled_from(PLANS),
        agent=st.none() | agents_made,
        claims=st.booleans(),
    )
    def begin(self, study: str, plan: Plan, agent: str | None, claims: bool) -> Any:
        is_taken = any(
            trial.plan == plan and trial.state != "abandoned" for trial in self.trials.values() if trial.study == study
        )
        try:
            if claims and agent is not None:
                trial = self.store.claim_trial(study, plan, "sampled", {"a": 1}, agent_id=agent)
                assert (trial is None) == is_taken
            else:
                trial = self.store.start_trial(study, plan, "sampled", {"a": 1}, agent_id=agent)
        except Superseded:
            assert agent is not None
            assert not self.agents[agent]
            return multiple()
        if trial is None:
            return multiple()
        assert agent is None or self.agents[agent]
        number = len(self.studies[study].trials)
        self.trials[trial.id] = Trial(study=study, number=number, plan=plan, role="sampled", agent=agent)
        self.studies[study].trials.append(trial.id)
        return trial.id

    @rule(trial=trials_made, outcome=st.sampled_from(sorted(OUTCOMES)), hours=st.integers(-2, 2))
    def finish(self, trial: str, outcome: str, hours: int) -> None:
        result = replace(result_of(trial, OUTCOMES[outcome]), finished=NOON + timedelta(hours=hours))
        known = self.trials[trial]
        if known.result not in (None, result):
            with pytest.raises(AlreadyFinished):
                self.store.finish_trial(result)
            return
        self.store.finish_trial(result)
        known.late = known.late or known.state == "abandoned"
        known.state, known.result = "finished", result

    @rule(trial=trials_made)
    def abandon(self, trial: str) -> None:
        self.store.abandon_trial(trial)
        known = self.trials[trial]
        known.state = "abandoned" if known.state == "running" else known.state

    # --- trainings ---

    @rule(target=launches_made, plan=st.sampled_from(PLANS))
    def launch(self, plan: Plan) -> str:
        launch = self.store.start_launch(plan, self.fingerprint, 1.5).id
        self.launches[launch] = None
        return launch

    @rule(launch=launches_made, steps=st.integers(0, 2))
    def finish_launch(self, launch: str, steps: int) -> None:
        result = LaunchResult(
            launch_id=launch, status="finished", steps=steps, training_samples_per_second=None, finished=NOON
        )
        if self.launches[launch] not in (None, result):
            with pytest.raises(AlreadyFinished):
                self.store.finish_launch(result)
            return
        self.store.finish_launch(result)
        self.launches[launch] = result

    @rule()
    def open_anew(self) -> None:
        self.store.close()
        self.store = open_store(self.url)

    # --- what is always true ---

    @invariant()
    def the_trials_are_those_of_the_model(self) -> None:
        kinds = {"running": RunningTrial, "abandoned": AbandonedTrial, "finished": FinishedTrial}
        for study, known in self.studies.items():
            trials = self.store.trials(study)
            assert [trial.id for trial in trials] == known.trials
            for number, trial in enumerate(trials):
                expected = self.trials[trial.id]
                assert (trial.number, trial.plan, trial.agent_id) == (number, expected.plan, expected.agent)
                assert type(trial) is kinds[expected.state]
                if isinstance(trial, FinishedTrial):
                    assert trial.result == expected.result
                    assert (trial.given_up is not None) == expected.late
            assert self.store.winner(study) == known.best
            assert (self.store.study(study).finished is not None) == (known.best is not None)
        answers = self.store.answers(self.fingerprint)
        assert {trial.id for trial in answers} == {key for key, trial in self.trials.items() if trial.result}
        running = {launch.id for launch in self.store.running_launches()}
        assert {key for key in self.launches if key in running} == {k for k, end in self.launches.items() if not end}


@on_both_databases
def test_the_store_does_what_a_plain_model_does(database_url: str) -> None:
    machine = type("Machine", (StoreMachine,), {"url": database_url})
    run_state_machine_as_test(machine, settings=SETTINGS)
    with open_store(database_url) as store:
        assert store.problems() == ()
