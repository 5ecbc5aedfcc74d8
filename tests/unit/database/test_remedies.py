"""Remedies for a database that cannot be reached."""

import pytest

from storage.database.engine import explain


def test_a_secret_is_hidden_wherever_it_stands_and_a_short_one_as_a_word() -> None:
    long = explain("it", RuntimeError("opening u:sesame@host, user=usesamex"), ("sesame",))
    assert "opening u:***@host, user=u***x" in long
    short = explain("it", RuntimeError("opening u:p@port, password=p"), ("p",))
    assert "opening u:***@port, password=***;" in short


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ('FATAL:  password authentication failed for user "me"', "check user and password in the URL"),
        ("connection to server failed: fe_sendauth: no password supplied", "write the password into the URL"),
        ('FATAL:  role "password" does not exist', "check the user in the URL"),
        ('FATAL:  database "full" does not exist', "check its name in the URL, or create it"),
        ('connection to server at "127.0.0.1", port 1 failed: Connection refused', "check host and port in the URL"),
        ("failed to resolve host 'nowhere': Name or service not known", "check the host in the URL"),
        ('FATAL:  no pg_hba.conf entry for host "::1"', "have the server admit this user"),
    ],
)
def test_each_refusal_of_a_server_has_its_own_remedy(reason: str, remedy: str) -> None:
    assert f"{reason}; {remedy}".replace("  ", " ") in explain("the database", RuntimeError(reason)).replace("  ", " ")
