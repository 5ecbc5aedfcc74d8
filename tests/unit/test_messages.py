"""Messages quote at most about a line of what a user or a library wrote."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from trials.errors import DataError, in_brief, in_one_line, shown_name


def test_a_long_word_lacks_its_middle_and_keeps_its_ends() -> None:
    name = "/data/" + "a" * 400_000 + "/picture.png"
    assert str(DataError(f"image {name} does not exist")) == (
        f"image {name[:90]}...(400018 characters)...{name[-40:]} does not exist"
    )


def test_a_message_of_usual_length_stays_as_it_is() -> None:
    message = "image /data/" + "folder/" * 20 + "a b.png does not exist;\ncorrect its name"
    assert str(DataError(message)) == message == in_brief(message)


def test_an_error_stays_the_same_between_processes() -> None:
    error = DataError("image " + "a" * 5000)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_control_characters_of_a_line_are_written_out() -> None:
    assert in_one_line("a\nb\x1b[31m \ud800") == r"a\nb\x1b[31m \ud800"


@given(text=st.text(max_size=60), times=st.integers(1, 200))
def test_brief_texts_have_a_bound_and_are_not_shortened_twice(text: str, times: int) -> None:
    long = text * times
    assert in_brief(in_brief(long)) == in_brief(long)
    assert all(len(line) <= 1500 for line in in_brief(long).split("\n"))
    assert len(shown_name(long)) <= 200
    assert shown_name(long).isprintable()
    assert in_one_line(long).isprintable()
