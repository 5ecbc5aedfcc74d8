"""Tables at the widths of terminals."""

from autotune.results.text_table import fitted, table

HEADER = ("plan", "hardware", "here")
ROWS = [
    ("e263c03eb07ce700", "2 x NVIDIA H200", "re-measure (software.torch was 2.12, now 2.13)"),
    ("a4e2c6036276f311", "8 x NVIDIA H200", "valid"),
]


def test_lines_that_go_elsewhere_have_any_length() -> None:
    header, rule, first, second = table(HEADER, ROWS).splitlines()
    assert header == "plan              hardware         here"
    assert rule == "-" * len(header)
    assert first == "  ".join(ROWS[0])
    assert second == "  ".join(ROWS[1])


def test_the_widest_column_is_folded_between_words_to_fit_a_terminal() -> None:
    assert table(HEADER, ROWS, 60).splitlines() == [
        "plan              hardware         here",
        "------------------------------------------------------------"[:39],
        "e263c03eb07ce700  2 x NVIDIA H200  re-measure",
        "                                   (software.torch was 2.12,",
        "                                   now 2.13)",
        "a4e2c6036276f311  8 x NVIDIA H200  valid",
    ]


def test_where_words_do_not_fit_each_row_is_a_paragraph() -> None:
    assert table(HEADER, [*ROWS[1:], ("0" * 16, "", "valid")], 30).splitlines() == [
        "plan      a4e2c6036276f311",
        "hardware  8 x NVIDIA H200",
        "here      valid",
        "",
        "plan      0000000000000000",
        "here      valid",
    ]


def test_long_lines_are_folded_between_words_with_their_indent() -> None:
    text = "short\n  pipeline 1 x data 2, ZeRO 0; split 12v+8l\n" + "-" * 30
    assert fitted(text, 24).splitlines() == ["short", "  pipeline 1 x data 2,", "  ZeRO 0; split 12v+8l", "-" * 30]
    assert fitted(text) == text  # no terminal


def test_rows_of_a_chart_are_not_folded() -> None:
    row = f"stage 0 |{'0123' * 10}|"
    assert fitted(row, 40) == row
