"""Programs that print a result: what is read of them, and why there is none."""

import os
import sys

import pytest

from zjax.processes.programs import result_line, run_program


@pytest.fixture
def run(tmp_path):
    """Runs a line of Python, and returns its outcome."""

    def start(code, *, program=sys.executable, timeout_seconds=100, **variables):
        return run_program(
            [program, "-c", code],
            os.environ | variables,
            tmp_path / "log",
            title=code,
            timeout_seconds=timeout_seconds,
        )

    return start


def test_a_result_is_read_and_the_output_is_logged(run, tmp_path):
    """Fails if a later program is judged by what an earlier one printed."""
    line = result_line({"loss": 2.5, "speed": {"median": 3}})
    first = run(f"print('noise'); print({line!r})")
    print_variable = "import os; print('RESULT', os.environ['ZJAX_A'])"
    second = run(print_variable, ZJAX_A='{"a": 7}')
    assert (first.result, first.failure) == ({"loss": 2.5, "speed": {"median": 3}}, "")
    assert first.output == f"noise\n{line}\n"
    assert (second.result, second.failure) == ({"a": 7}, "")
    assert second.output == 'RESULT {"a": 7}\n'
    assert (tmp_path / "log").read_text() == (
        f"\n=== print('noise'); print({line!r})\n{first.output}"
        f"\n=== {print_variable}\n{second.output}"
    )


@pytest.mark.parametrize(
    ("code", "options", "failure"),
    [
        ("print('so far'); raise SystemExit(3)", {}, "exit code 3"),
        ("print('so far'); exit('CUDA out of memory.')", {}, "out of memory"),
        ("print('so far')", {}, "printed 0 RESULT lines"),
        ("print('RESULT {}\\nRESULT {}\\nso far')", {}, "printed 2 RESULT lines"),
        ("print('RESULT 1\\nso far')", {}, "printed a RESULT that is no JSON object"),
        ("print('RESULT {\\nso far')", {}, "printed a RESULT that is no JSON object"),
        (
            "import time; print('so far', flush=True); time.sleep(60)",
            {"timeout_seconds": 1},
            "ran past 1 s",
        ),
        (
            "",
            {"program": "/does/not/exist"},
            "could not start: No such file or directory",
        ),
    ],
)
def test_why_there_is_no_result(run, code, options, failure):
    found = run(code, **options)
    assert (found.result, found.failure) == ({}, failure)
    # a busy machine may end one that ran past its time before it prints
    assert found.output.endswith("so far\n") or options or "memory" in failure
