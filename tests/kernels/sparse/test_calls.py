"""The calls that a sanitizer watches on a GPU run at all."""

from tests.support import kernel_calls


def test_every_call_runs(capsys):
    kernel_calls.main("reference")
    expected = ["ran forward", "ran backward_queries", "ran backward_keys"]
    assert capsys.readouterr().out.splitlines() == expected
