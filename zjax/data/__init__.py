"""Token data: preparation, sources, sampling order, and placement on devices."""

from zjax.data.batches import batches_problems, wrap_batches
from zjax.data.evaluation import EvaluationSet, find_evaluation
from zjax.data.loader import Batches, Loader, make_loader
from zjax.data.source import make_tokenizer, read_record
from zjax.data.tokenizer import Tokenizer

__all__ = [
    "Batches",
    "EvaluationSet",
    "Loader",
    "Tokenizer",
    "batches_problems",
    "find_evaluation",
    "make_loader",
    "make_tokenizer",
    "read_record",
    "wrap_batches",
]
