"""Mixture of experts: routing, dispatch, experts."""
