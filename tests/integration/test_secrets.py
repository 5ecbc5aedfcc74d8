"""A password in a database URL is in no output, log or file, whatever goes wrong."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from autotune.cli import main
from storage.database.url import parse
from storage.store import open_store
from tests.programs import postgres
from tests.programs.users import JobFile
from tests.values.parameters import parameters
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan, result_of

CANARY = "c4nary-p4ss"
COMMANDS = (
    ["plans"],
    ["plans", "--here"],
    ["studies"],
    ["doctor"],
    ["show", packed_plan().id],
    ["show", "no-such-plan"],
    ["db", "upgrade"],
    ["db", "check"],
    ["db", "repair"],
    ["db", "export", "--hardware", "a100"],
    ["db", "import", "no-such-file"],
)
SHORT = ("plans", "doctor", "show no-such-plan", "db upgrade")
WRONG = (
    f"postgresql://me:{CANARY}@127.0.0.1:1/results",
    f"postgresql://127.0.0.1:1/results?password={CANARY}",
    f"postgresql://127.0.0.1:1/results?sslpassword={CANARY}&no_such_option=1",
    f"postgresql://me:{CANARY}@127.0.0.1:port/results",
    f"postgresql://me:{CANARY}@[::1/results",
    f"postgres://me:{CANARY}@127.0.0.1/results",
    f"mysql://me:{CANARY}@127.0.0.1/results",
    f"sqlite://me:{CANARY}@host/results.db",
    f"sqlite:///results.db?password={CANARY}",
    f"{CANARY}",
    f"me:{CANARY}@127.0.0.1/results",
    f"password={CANARY} host=127.0.0.1",
    f"postgresql://me:half@{CANARY}@127.0.0.1:1/results",
    f"postgresql://me:half@a/{CANARY}@127.0.0.1:1/results",
    f"postgresql://me:half@a?{CANARY}@127.0.0.1:1/results",
    f"postgresql://127.0.0.1:1/results?password={CANARY}&password={CANARY}2",
)


def said(*arguments: str) -> str:
    answer = CliRunner().invoke(main, [*arguments, "-vv"])
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer.output + answer.stderr


@pytest.fixture(scope="module")
def guarded_url(postgres_server: str) -> Iterator[str]:
    """A database that only the password opens, with a plan in it."""
    with postgres.database(postgres_server) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP ROLE IF EXISTS canary")
            connection.execute(f"CREATE ROLE canary LOGIN SUPERUSER PASSWORD '{CANARY}'")
        opened = parse(url).set(username="canary", password=CANARY)
        guarded = opened.render_as_string(hide_password=False).replace("postgresql+psycopg", "postgresql")
        with open_store(guarded) as store:
            study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id
            store.finish_trial(result_of(store.start_trial(study, packed_plan(), "default").id))
            concluded(store, best_of(study))
        yield guarded


@pytest.mark.parametrize("command", parameters({" ".join(each): each for each in COMMANDS}, short=SHORT))
def test_no_command_shows_the_password_of_its_database(guarded_url: str, home: Path, command: list[str]) -> None:
    output = said(*command, "--db", guarded_url)
    assert CANARY not in output
    assert output


@pytest.mark.parametrize(
    "command", parameters({each: each for each in ("plans", "doctor", "db repair")}, short=("plans",))
)
@pytest.mark.parametrize("url", WRONG)
def test_no_refusal_shows_a_password(home: Path, url: str, command: str) -> None:
    output = said(*command.split(), "--db", url)
    assert CANARY not in output
    assert "Error: " in output


def test_no_file_holds_the_password(guarded_url: str, job: JobFile, home: Path) -> None:
    output = said("launch", str(job.path), "--plan", packed_plan().id, "--dry-run", "--db", guarded_url)
    assert CANARY not in output
    files = [path for path in home.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if CANARY.encode() in path.read_bytes()]
    assert CANARY not in "".join(str(path) for path in files)
