"""The table names what a bug report needs, and fits where it is pasted."""

import sys

import jax
import pytest

from zjax.observe import describe_machine


@pytest.fixture
def table(monkeypatch):
    """Rows of the report by their first word or words."""
    monkeypatch.setenv("JAX_NOTE", "--a=1 --b=[data]")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNRELATED_TOKEN", "secret")
    return describe_machine()


def row(table, name):
    (line,) = [line for line in table.splitlines() if line.startswith(f"{name}  ")]
    return line.removeprefix(name).strip()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("jax", jax.__version__),
        ("python", sys.version.split()[0]),
        ("devices", "8 here of 8 in all"),
        ("device kind", "cpu"),
        ("memory kinds", "device, pinned_host, unpinned_host"),
        ("process", "0 of 1"),
        ("attention auto", "xla (cudnn needs an NVIDIA GPU and this is cpu)"),
        ("attention cudnn", "cannot run: it needs an NVIDIA GPU and this is cpu"),
        ("attention xla", "runs here"),
        ("JAX_NOTE", "--a=1 --b=[data]"),
        ("NCCL_DEBUG", "INFO"),
    ],
)
def test_a_row_says_what_is_here(table, name, expected):
    assert row(table, name) == expected


@pytest.mark.parametrize("name", ["system", "CPU cores", "memory", "disk free", "flax"])
def test_what_every_machine_has_is_there(table, name):
    assert row(table, name)


def test_variables_that_do_not_matter_stay_private(table):
    assert "secret" not in table


def test_the_table_fits_100_columns(table):
    assert max(map(len, table.splitlines())) <= 100
