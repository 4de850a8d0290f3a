"""Messages stay readable, whatever the value at fault."""

import pickle

from zjax.errors import DataError, Problem


def test_a_long_value_is_shown_at_both_ends():
    text = str(Problem("a", "x" * 10**6 + "y", "is long", "cut it"))
    assert text == f"a='{'x' * 499}...{'x' * 498}y' is long; cut it"


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    value = []
    for _ in range(10**5):
        value = [value]
    assert str(Problem("a", value, "is deep", "cut it")) == "a=<list> is deep; cut it"
    assert str(Problem("a", 10**5000, "is long", "cut it")).startswith("a=<int> is")


def test_an_error_of_another_process_keeps_its_problems():
    error = DataError(Problem("a", 1, "is odd", "use 2"), Problem("b", 3, "is", "use"))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is DataError
    assert (again.problems, str(again)) == (error.problems, str(error))
