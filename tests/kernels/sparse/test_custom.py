"""An array of one's own is a rule like the others."""

import dataclasses

import numpy as np
import pytest

from zjax_kernels.sparse.sparsity_config import Custom

LIVE = np.random.default_rng(0).random((2, 4, 4)) < 0.5


@pytest.mark.parametrize(
    "live", [LIVE, LIVE.astype(int), LIVE.tolist()], ids=["bool", "0-and-1", "list"]
)
def test_its_layout_is_the_array(live):
    np.testing.assert_array_equal(Custom(2, live=live).layout(64).to_dense(), LIVE)


def test_heads_may_share_an_array():
    layout = Custom(3, 32, live=LIVE[0]).layout(128)
    np.testing.assert_array_equal(layout.to_dense(), [LIVE[0]] * 3)
    assert len(layout.patterns) == 1


def test_shorter_sequences_have_the_first_blocks():
    found = Custom(2, live=LIVE).layout(32).to_dense()
    np.testing.assert_array_equal(found, LIVE[:, :2, :2])


def test_later_tokens_are_hidden_on_demand():
    layout = Custom(2, live=LIVE, attention="unidirectional").layout(64)
    np.testing.assert_array_equal(layout.to_dense(), LIVE & np.tri(4, dtype=bool))
    assert layout.causal


def test_what_it_holds_makes_it_equal():
    """Fails if one array could be given the layout of another."""
    rule = Custom(2, live=LIVE)
    assert rule == Custom(2, live=LIVE.astype(int))
    assert hash(rule) == hash(dataclasses.replace(rule))
    assert rule != Custom(2, live=~LIVE)


def test_what_is_changed_later_does_not_count():
    live = LIVE.copy()
    rule = Custom(2, live=live)
    live[:] = True
    np.testing.assert_array_equal(rule.layout(64).to_dense(), LIVE)


def test_longer_than_the_array_is_refused():
    with pytest.raises(ValueError) as error:
        Custom(2, live=LIVE).layout(80)
    assert str(error.value) == (
        "num_blocks=5 is more than the 4 of live; give a larger array, or up to 64 "
        "tokens, as by max_seq_length=64"
    )
