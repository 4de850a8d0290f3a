"""A mesh proposed from model, batch and machine."""

from zjax.propose.choose import choose_mesh, is_open, propose_mesh, this_machine
from zjax.propose.reasons import Proposal, describe_proposal
from zjax.propose.trial import Machine

__all__ = [
    "Machine",
    "Proposal",
    "choose_mesh",
    "describe_proposal",
    "is_open",
    "propose_mesh",
    "this_machine",
]
