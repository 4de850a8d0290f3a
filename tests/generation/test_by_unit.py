"""Passes of decoders that are read unit by unit."""

from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp

from zjax.generation.by_unit import UnitDecoder, UnitPasses


def test_pages_are_made_by_a_program():
    """Fails if each device makes whole arrays of pages before they are split."""
    seen = []

    def empty_caches(shapes, num_pages, page_size):
        pages = jnp.zeros((num_pages, page_size))
        seen.append((shapes, isinstance(pages, jax.core.Tracer)))
        return [pages, pages]

    reader = SimpleNamespace(empty_caches=empty_caches)
    programs = mock.Mock(reader=reader)
    decoder = mock.Mock(spec=UnitDecoder, programs=programs, shapes="shapes")
    sizes = {"num_slots": 1, "max_length": 4, "num_pages": 3, "page_size": 2}
    passes = UnitPasses(decoder, **sizes)
    assert seen == [("shapes", True)]
    assert [pages.shape for pages in passes._caches] == [(3, 2)] * 2
